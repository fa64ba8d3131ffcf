"""Both daemons give the same shapes: the token on every route, problems, files, processes."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from tests.support.acp_http import AcpHttp

INITIALIZE: dict[str, Any] = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": 1}}
ROUTES = [
    ("GET", "/v1/health"),
    ("GET", "/v1/agents"),
    ("GET", "/v1/acp"),
    ("GET", "/v1/acp/s"),
    ("POST", "/v1/acp/s?agent=codex"),
    ("DELETE", "/v1/acp/s"),
    ("GET", "/v1/fs/stat?path=/"),
    ("POST", "/v1/processes/run"),
]


async def test_no_route_answers_without_the_token(acp: AcpHttp) -> None:
    values = ["", "Bearer", "Bearer wrong", f"Basic {acp.daemon.token}"]
    for (method, path), value in itertools.product(ROUTES, values):
        reply = await acp.call(method, path, headers={"Authorization": value}, json=INITIALIZE)
        assert (reply.status, reply.slug) == (401, "token_invalid"), (path, value)
        assert (reply.body["title"], reply.body["status"]) == ("Token Invalid", 401)
    assert await acp.servers() == {}


async def test_health_and_lists(acp: AcpHttp) -> None:
    assert (await acp.call("GET", "/v1/health")).body["status"] == "ok"
    assert {"codex", "claude"} <= {agent["id"] for agent in (await acp.call("GET", "/v1/agents")).body["agents"]}
    assert await acp.servers() == {}
    await acp.post("s", INITIALIZE, agent="codex")
    entry = (await acp.servers())["s"]
    assert entry["agent"] == "codex"
    assert entry["createdAtMs"] > 1_700_000_000_000


async def test_a_server_that_is_not_there(acp: AcpHttp) -> None:
    missing = await acp.call("GET", "/v1/acp/none")
    assert (missing.status, missing.slug, missing.body["sessionId"]) == (404, "session_not_found", "none")
    no_agent = await acp.post("none", INITIALIZE)
    assert (no_agent.status, no_agent.slug) == (400, "invalid_request")
    assert "agent" in no_agent.body["detail"]
    assert (await acp.delete("none")).status == 204


async def test_an_agent_that_is_not_there(acp: AcpHttp) -> None:
    reply = await acp.post("s", INITIALIZE, agent="nobody")
    assert (reply.status, reply.slug, reply.body["agent"]) == (400, "unsupported_agent", "nobody")
    assert await acp.servers() == {}


async def test_a_server_keeps_its_agent(acp: AcpHttp) -> None:
    assert (await acp.post("s", INITIALIZE, agent="codex")).status == 200
    reply = await acp.post("s", INITIALIZE | {"id": 2}, agent="claude")
    assert (reply.status, reply.slug) == (409, "conflict")
    assert (await acp.post("s", INITIALIZE | {"id": 3}, agent="codex")).status == 200


async def test_bodies_that_are_no_message_change_nothing(acp: AcpHttp) -> None:
    await acp.post("s", INITIALIZE, agent="codex")
    for body in ('{"jsonrpc', "[1]", '"text"', ""):
        reply = await acp.call("POST", "/v1/acp/s", data=body, headers={"Content-Type": "application/json"})
        assert (reply.status, reply.slug) == (400, "invalid_request"), body
    reply = await acp.call("POST", "/v1/acp/s", data="{}", headers={"Content-Type": "text/plain"})
    assert (reply.status, reply.slug) == (415, "unsupported_media_type")
    assert (await acp.post("s", INITIALIZE | {"id": 2})).status == 200


async def test_the_stream_wants_to_be_a_stream(acp: AcpHttp) -> None:
    await acp.post("s", INITIALIZE, agent="codex")
    reply = await acp.call("GET", "/v1/acp/s", headers={"Accept": "text/html"})
    assert (reply.status, reply.slug) == (406, "not_acceptable")
    reply = await acp.call("GET", "/v1/acp/s", headers={"Last-Event-ID": "last"})
    assert (reply.status, reply.slug) == (400, "invalid_request")


async def test_unknown_routes_and_methods(acp: AcpHttp) -> None:
    reply = await acp.call("GET", "/v1/nothing")
    assert (reply.status, reply.slug) == (404, "invalid_request")
    assert (await acp.call("PUT", "/v1/health")).status == 405


async def test_files(acp: AcpHttp, tmp_path: Path) -> None:
    folder = tmp_path / "work"
    path = folder / "deep" / "note.bin"
    content = bytes(range(256)) * 4096
    written = await acp.call("PUT", "/v1/fs/file", params={"path": str(path)}, data=content)
    assert (written.status, written.body) == (200, {"path": str(path), "bytesWritten": len(content)})
    assert path.read_bytes() == content
    async with acp.session.get(f"{acp.daemon.url}/v1/fs/file", params={"path": str(path)}) as response:
        assert (response.status, response.content_type) == (200, "application/octet-stream")
        assert await response.read() == content

    stat = await acp.call("GET", "/v1/fs/stat", params={"path": str(path)})
    assert stat.body.items() >= {"path": str(path), "entryType": "file", "size": len(content)}.items()
    assert stat.body["modified"].endswith("+00:00")
    made = await acp.call("POST", "/v1/fs/mkdir", params={"path": str(folder / "a" / "b")})
    assert (made.status, made.body) == (200, {"path": str(folder / "a" / "b")})
    entries = (await acp.call("GET", "/v1/fs/entries", params={"path": str(folder)})).body
    assert {(e["name"], e["entryType"], e["path"]) for e in entries} == {
        ("deep", "directory", str(folder / "deep")),
        ("a", "directory", str(folder / "a")),
    }
    deleted = await acp.call("DELETE", "/v1/fs/entry", params={"path": str(path)})
    assert (deleted.status, deleted.body) == (200, {"path": str(path)})
    assert not path.exists()


async def test_paths_are_relative_to_home(acp: AcpHttp) -> None:
    await acp.call("PUT", "/v1/fs/file", params={"path": "here.txt"}, data=b"x")
    assert (acp.daemon.home / "here.txt").read_text() == "x"


async def test_paths_that_are_not_there(acp: AcpHttp) -> None:
    for method, route, path in (
        ("GET", "file", "none"),
        ("GET", "file", "."),
        ("GET", "stat", "none"),
        ("GET", "entries", "none"),
        ("DELETE", "entry", "none"),
    ):
        reply = await acp.call(method, f"/v1/fs/{route}", params={"path": path})
        assert (reply.status, reply.slug) == (400, "invalid_request"), route


async def test_a_process_is_run_to_its_end(acp: AcpHttp, tmp_path: Path) -> None:
    script = "pwd; echo $WORD; echo oops >&2; exit 3"
    job = {"command": "sh", "args": ["-c", script], "cwd": str(tmp_path), "env": {"WORD": "hi"}, "timeoutMs": 5000}
    reply = await acp.call("POST", "/v1/processes/run", json=job)
    assert reply.status == 200
    assert reply.body.pop("durationMs") < 5000
    assert reply.body == {
        "exitCode": 3,
        "timedOut": False,
        "stdout": f"{tmp_path}\nhi\n",
        "stderr": "oops\n",
        "stdoutTruncated": False,
        "stderrTruncated": False,
    }


async def test_a_process_is_bounded_in_time_and_output(acp: AcpHttp) -> None:
    slow = (
        await acp.call("POST", "/v1/processes/run", json={"command": "sleep", "args": ["30"], "timeoutMs": 200})
    ).body
    assert (slow["exitCode"], slow["timedOut"]) == (None, True)
    assert 150 < slow["durationMs"] < 5000
    job = {"command": "seq", "args": ["100000"], "maxOutputBytes": 20}
    long = (await acp.call("POST", "/v1/processes/run", json=job)).body
    assert (long["exitCode"], long["stdoutTruncated"], long["stderrTruncated"]) == (0, True, False)
    assert long["stdout"] == "1\n2\n3\n4\n5\n6\n7\n8\n9\n10"
    killed = (await acp.call("POST", "/v1/processes/run", json={"command": "sh", "args": ["-c", "kill -9 $$"]})).body
    assert (killed["exitCode"], killed["timedOut"]) == (None, False)


async def test_processes_that_cannot_be_run(acp: AcpHttp) -> None:
    missing = await acp.call("POST", "/v1/processes/run", json={"command": "no-such-program"})
    assert (missing.status, missing.slug) == (502, "stream_error")
    nowhere = await acp.call("POST", "/v1/processes/run", json={"command": "pwd", "cwd": "/no/such/place"})
    assert (nowhere.status, nowhere.slug) == (502, "stream_error")
    empty = await acp.call("POST", "/v1/processes/run", json={"command": ""})
    assert (empty.status, empty.slug) == (400, "invalid_request")


async def test_ps_sees_the_agents(acp: AcpHttp) -> None:
    await acp.post("s", INITIALIZE, agent="codex")
    reply = await acp.call("POST", "/v1/processes/run", json={"command": "ps", "args": ["-eo", "pid=,ppid=,args="]})
    assert "hearth.agents.scripted" in reply.body["stdout"]
