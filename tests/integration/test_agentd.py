"""agentd keeps its promises with agents that misbehave, readers that do not read, and process trees that hide."""

from __future__ import annotations

import asyncio
import io
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import processes
from tests.support.acp_http import AcpHttp, client_of
from tests.support.harness import ROOT, SCRIPTED_AGENT, Agent, agentd
from tests.support.waiting import ended, eventually, pid_in

INITIALIZE: dict[str, Any] = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": 1}}
# Clears its environment, leaves its session, loses its parent: only whoever adopts orphans finds it.
HIDDEN = "env -i setsid sh -c 'sleep 300 & echo $! > {file}'"


@asynccontextmanager
async def running(home: Path, *arguments: str, **agents: Agent | list[str]) -> AsyncIterator[AcpHttp]:
    """A client of an agentd with these agents, the scripted one among them."""
    everyone = {"scripted": SCRIPTED_AGENT, **agents}
    async with agentd(everyone, home, arguments=arguments) as daemon, client_of(daemon) as client:
        yield client


def starting(how: str) -> Agent:
    """The scripted agent with a broken start."""
    return Agent(SCRIPTED_AGENT, {"HEARTH_SCRIPTED_START": how})


# --- start and stop


def run_agentd(*arguments: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run it where it is expected to end by itself."""
    return subprocess.run(
        [sys.executable, "-m", "services.sandbox.agentd", *arguments],
        env={**os.environ, processes.MARKER: processes.marker(), **(env or {})},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=20,
        check=False,
    )


@pytest.mark.parametrize(
    ("agents", "word"),
    [
        ("not json", "--agents-file"),
        ("[]", "--agents-file"),
        ('{"a": {"command": "sh"}}', "agent 'a': 'command'"),
        ('{"a": {"command": []}}', "agent 'a': 'command'"),
        ('{"a": {"command": ["sh"], "env": {"A": 1}}}', "agent 'a': 'env'"),
        ('{"a": {"command": ["sh"], "cwd": 1}}', "agent 'a': 'cwd'"),
        ('{"../a": {"command": ["sh"]}}', "agent '../a': the name"),
    ],
)
def test_a_wrong_agents_file_is_named(tmp_path: Path, agents: str, word: str) -> None:
    (tmp_path / "agents.json").write_text(agents)
    result = run_agentd("--agents-file", str(tmp_path / "agents.json"), env={"HEARTH_AGENTD_TOKEN": "t"})
    assert (result.returncode, word in result.stderr) == (2, True), result.stderr


def test_it_does_not_start_without_a_token(tmp_path: Path) -> None:
    (tmp_path / "agents.json").write_text("{}")
    (tmp_path / "empty").write_text("\n")
    for arguments in ([], ["--token-file", str(tmp_path / "empty")], ["--token-file", str(tmp_path / "none")]):
        result = run_agentd("--agents-file", str(tmp_path / "agents.json"), *arguments)
        assert (result.returncode, "token" in result.stderr) == (2, True), result.stderr


def test_it_says_when_it_cannot_bind(tmp_path: Path) -> None:
    (tmp_path / "agents.json").write_text("{}")
    arguments = ["--agents-file", str(tmp_path / "agents.json"), "--host", "203.0.113.1"]
    result = run_agentd(*arguments, env={"HEARTH_AGENTD_TOKEN": "t"})
    assert (result.returncode, "cannot serve on 203.0.113.1" in result.stderr) == (1, True), result.stderr


def test_it_imports_nothing_else_of_ours() -> None:
    script = "import services.sandbox.agentd.__main__, sys; print(*sys.modules)"
    modules = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    ours = {name for name in modules if name.split(".")[0] in ("services", "hearth", "tests")}
    assert ours - {"services", "services.sandbox"} == {n for n in ours if n.startswith("services.sandbox.agentd")}
    assert not {"grpc", "opentelemetry", "pydantic"} & set(modules)


async def test_the_token_in_the_environment_does_not_reach_the_agent(tmp_path: Path) -> None:
    script = "import json, os; input(); print(json.dumps({'id': 1, 'result': {**os.environ, 'PWD': os.getcwd()}}))"
    agent = Agent([sys.executable, "-c", script], {"OWN": "yes"}, str(tmp_path))
    env = {"HEARTH_AGENTD_TOKEN": "secret-token", "HEARTH_SANDBOX_ID": "box-1"}
    async with agentd({"printer": agent}, tmp_path / "home", env=env) as daemon, client_of(daemon) as acp:
        seen = (await acp.post("s", INITIALIZE, agent="printer")).result
        assert "secret-token" not in json.dumps(seen)
        assert (seen["OWN"], seen["HEARTH_SANDBOX_ID"], seen["PWD"]) == ("yes", "box-1", str(tmp_path))
        assert "HEARTH_AGENTD_SERVER" in seen


async def test_sigterm_ends_it_and_all_trees_within_two_seconds(tmp_path: Path) -> None:
    async with running(tmp_path / "home") as acp:
        turns = []
        for server in ("a", "b"):
            session = await acp.open(server, "scripted", str(tmp_path))
            hidden = HIDDEN.format(file=tmp_path / f"hidden-{server}")
            stubborn = f"trap '' TERM; echo $$ > {tmp_path}/stubborn-{server}; sleep 300; true"
            text = f"ignore-eof\nleave-child 300\nrun {hidden} > /dev/null 2>&1\nrun {stubborn}"
            turns.append(asyncio.create_task(acp.prompt(server, session, text)))
            await pid_in(tmp_path / f"hidden-{server}")
            await pid_in(tmp_path / f"stubborn-{server}")
        trees = [child.pid for child in psutil.Process(acp.daemon.process.pid).children(recursive=True)]
        # Each: the agent, the left child, the hidden one, the stubborn shell and, in a moment, its sleep.
        assert len(trees) >= 8
        started = time.monotonic()
        acp.daemon.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(acp.daemon.process.wait, 5) == 0
        assert time.monotonic() - started < 2
        await eventually(lambda: all(ended(pid) for pid in trees))
        await asyncio.gather(*turns, return_exceptions=True)


# --- agents that do not start


async def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    nowhere = Agent(SCRIPTED_AGENT, cwd=str(tmp_path / "none"))
    async with running(tmp_path / "home", missing=["/no/such/agent"], nowhere=nowhere) as acp:
        for agent in ("missing", "nowhere"):
            reply = await acp.post("s", INITIALIZE, agent=agent)
            assert (reply.status, reply.slug) == (500, "agent_start_failed")
        assert await acp.servers() == {}
        listed = {a["id"]: a["installed"] for a in (await acp.call("GET", "/v1/agents")).body["agents"]}
        assert listed == {"scripted": True, "missing": False, "nowhere": True}
        assert (await acp.post("s", INITIALIZE, agent="scripted")).status == 200


async def test_an_agent_that_exits_at_once(tmp_path: Path) -> None:
    async with running(tmp_path / "home", broken=starting("exit:3")) as acp:
        reply = await acp.post("s", INITIALIZE, agent="broken")
        assert (reply.status, reply.slug) == (502, "stream_error")
        assert "code 3" in reply.body["detail"]
        log = acp.daemon.home / "agent-broken.log"
        assert "does not start" in log.read_text()


@pytest.mark.parametrize("how", ["hang", "garbage"])
async def test_an_agent_that_never_answers_initialize(tmp_path: Path, how: str) -> None:
    async with running(tmp_path / "home", "--initialize-timeout", "2", broken=starting(how)) as acp:
        reply = await asyncio.wait_for(acp.post("s", INITIALIZE, agent="broken"), 30)
        assert (reply.status, reply.slug) == (504, "timeout")
        async with acp.stream("s") as stream:
            await stream.until(lambda s: s.named("_adapter/agent_exited"))
            assert len(stream.named("_adapter/invalid_stdout")) == (4 if how == "garbage" else 0)
            assert stream.messages[-1]["params"].items() >= {"success": False, "reason": "initialize_timeout"}.items()
        later = await acp.post("s", INITIALIZE | {"id": 2})
        assert (later.status, later.slug) == (502, "stream_error")


async def test_first_posts_at_once_start_one_agent(tmp_path: Path) -> None:
    async with running(tmp_path / "home") as acp:
        replies = await asyncio.gather(
            *(acp.post("s", INITIALIZE | {"id": number}, agent="scripted") for number in range(10))
        )
        assert {reply.status for reply in replies} == {200}
        assert len(psutil.Process(acp.daemon.process.pid).children()) == 1


async def test_a_delete_behind_the_first_post_leaves_no_agent(tmp_path: Path) -> None:
    async with running(tmp_path / "home") as acp:
        for _ in range(5):
            first = asyncio.create_task(acp.post("s", INITIALIZE, agent="scripted"))
            await asyncio.sleep(0)
            deletes = await asyncio.gather(acp.delete("s"), acp.delete("s"))
            assert [reply.status for reply in deletes] == [204, 204]
            await first
            await acp.delete("s")
        assert psutil.Process(acp.daemon.process.pid).children() == []


# --- what passes and what does not


async def test_two_requests_of_one_id(tmp_path: Path) -> None:
    async with running(tmp_path / "home") as acp:
        session = await acp.open("s", "scripted", str(tmp_path))
        prompt = {"sessionId": session, "prompt": [{"type": "text", "text": "hang"}]}
        turn = asyncio.create_task(
            acp.post("s", {"jsonrpc": "2.0", "id": "x", "method": "session/prompt", "params": prompt})
        )
        async with acp.stream("s") as stream:
            second = await acp.post("s", {"jsonrpc": "2.0", "id": "x", "method": "session/new", "params": {}})
            assert (second.status, second.slug) == (409, "conflict")
            await acp.notify("s", "session/cancel", {"sessionId": session})
            assert (await turn).result["stopReason"] == "cancelled"
            await stream.until(lambda s: any(m.get("id") == "x" for m in s.messages))


async def test_messages_that_are_no_json_rpc_start_nothing(tmp_path: Path) -> None:
    async with running(tmp_path / "home") as acp:
        for message in (
            {"jsonrpc": "1.0", "id": 1, "method": "x"},
            {"jsonrpc": "2.0", "id": None, "method": "x"},
            {"jsonrpc": "2.0", "id": {}, "method": "x"},
            {"jsonrpc": "2.0", "id": 1, "method": 1},
            {"jsonrpc": "2.0", "id": 1},
            {"jsonrpc": "2.0"},
        ):
            reply = await acp.post("s", message, agent="scripted")
            assert (reply.status, reply.slug) == (400, "invalid_request"), message
        too_long = await acp.post("s" * 300, INITIALIZE, agent="scripted")
        assert (too_long.status, too_long.slug) == (400, "invalid_request")
        assert await acp.servers() == {}


async def test_a_body_over_several_lines_arrives_as_one(tmp_path: Path) -> None:
    async with running(tmp_path / "home") as acp:
        body = json.dumps(INITIALIZE, indent=2).replace("\n", "\r\n")
        headers = {"Content-Type": "application/json"}
        reply = await acp.call("POST", "/v1/acp/s?agent=scripted", data=body, headers=headers)
        assert reply.result["protocolVersion"] == 1


async def test_bodies_have_a_limit(tmp_path: Path) -> None:
    async with running(tmp_path / "home") as acp:
        large = INITIALIZE | {"params": {"x": "x" * 17 * 1024 * 1024}}
        reply = await acp.post("s", large, agent="scripted")
        assert (reply.status, reply.slug) == (413, "payload_too_large")
        reply = await acp.call("PUT", "/v1/fs/file?path=big", data=io.BytesIO(b"x" * 65 * 1024 * 1024))
        assert (reply.status, reply.slug) == (413, "payload_too_large")
        assert {path.name for path in acp.daemon.home.iterdir()} == {"token", "agents.json", "port", "daemon.log"}


async def test_an_agent_that_does_not_read(tmp_path: Path) -> None:
    async with running(tmp_path / "home", deaf=["sleep", "300"]) as acp:
        note = {"jsonrpc": "2.0", "method": "note", "params": {"x": "x" * 8 * 1024 * 1024}}
        statuses = [(await acp.post("s", note, agent="deaf")).status for _ in range(6)]
        assert statuses == [202] * 5 + [502]
        assert (await acp.delete("s")).status == 204


async def test_a_flood_of_garbage_does_not_push_out_messages(tmp_path: Path) -> None:
    command = ["sh", "-c", f"seq 100000 | sed 's/$/ bottles/'; exec {' '.join(SCRIPTED_AGENT)}"]
    async with running(tmp_path / "home", mad=command) as acp:
        await acp.open("s", "mad", str(tmp_path))
        async with acp.stream("s") as stream:
            await stream.until(lambda s: any("sessionId" in m.get("result", {}) for m in s.messages))
            assert len(stream.named("_adapter/invalid_stdout")) == 100
        assert '"lines": 100000' in acp.daemon.log()
        assert "bottles" not in acp.daemon.log()


async def test_a_line_without_end_fails_the_agent(tmp_path: Path) -> None:
    async with running(tmp_path / "home") as acp:
        session = await acp.open("s", "scripted", str(tmp_path))
        whole = await acp.prompt("s", session, f"line {15 * 1024 * 1024}")
        assert whole.result["stopReason"] == "end_turn"
        reply = await acp.prompt("s", session, f"line {17 * 1024 * 1024}")
        assert (reply.status, reply.slug) == (502, "stream_error")
        assert "line_too_long" in reply.body["detail"]
        async with acp.stream("s") as stream:
            await stream.until(lambda s: s.named("_adapter/agent_exited"))
            assert stream.messages[-1]["params"].items() >= {"success": False, "reason": "line_too_long"}.items()
        assert (await acp.prompt("s", session, "hello")).status == 502


async def test_an_agent_that_closes_its_output(tmp_path: Path) -> None:
    async with running(tmp_path / "home", mute=["sh", "-c", "exec >&-; sleep 300"]) as acp:
        reply = await asyncio.wait_for(acp.post("s", INITIALIZE, agent="mute"), 5)
        assert (reply.status, reply.slug) == (502, "stream_error")
        assert "output_closed" in reply.body["detail"]


# --- readers


async def test_a_reader_that_does_not_read_stops_nobody(tmp_path: Path) -> None:
    async with running(tmp_path / "home") as acp:
        session = await acp.open("s", "scripted", str(tmp_path))
        reader, writer = await asyncio.open_connection("127.0.0.1", int(acp.daemon.url.rsplit(":", 1)[1]), limit=1024)
        writer.write(f"GET /v1/acp/s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {acp.daemon.token}\r\n\r\n".encode())
        assert b"200" in await reader.readline()
        # 40 MB are more than the ring, the sockets and the buffers between them hold.
        reply = await acp.prompt("s", session, "flood 4000 10000\nstream 3 words")
        assert reply.result["stopReason"] == "end_turn"
        async with acp.stream("s", last=2) as late:
            await late.until(lambda s: any(m.get("result", {}).get("stopReason") for m in s.messages))
            assert late.ids[0] > 2000
            assert late.ids == list(range(late.ids[0], late.ids[-1] + 1))
            assert 15 * 1024 * 1024 < sum(len(json.dumps(m, separators=(",", ":"))) for m in late.messages) < 2**24
        # The slow one goes on where it stands, and sees the jump.
        seen: list[int] = []
        async with asyncio.timeout(20):
            while not seen or seen[-1] < late.ids[-1]:
                block = await reader.read(2**20)
                seen += [
                    int(line[4:]) for line in block.split(b"\n") if line.startswith(b"id: ") and line[4:].isdigit()
                ]
        assert any(after - before > 100 for before, after in itertools.pairwise(seen))
        writer.close()
        await writer.wait_closed()


async def test_a_number_from_an_earlier_life_is_refused(tmp_path: Path) -> None:
    async with running(tmp_path / "home") as acp:
        await acp.open("s", "scripted", str(tmp_path))
        reply = await acp.call("GET", "/v1/acp/s", headers={"Last-Event-ID": "1000"})
        assert (reply.status, reply.slug) == (400, "invalid_request")


async def test_silence_is_filled_with_heartbeats(tmp_path: Path) -> None:
    async with running(tmp_path / "home", "--heartbeat", "0.05") as acp:
        await acp.open("s", "scripted", str(tmp_path))
        async with acp.stream("s") as stream:
            await stream.until(lambda s: len(s.comments) >= 3)
            assert set(stream.comments) == {": heartbeat"}
            assert len(stream.events) == 2


# --- process trees


async def test_delete_kills_the_whole_tree(tmp_path: Path) -> None:
    # Starts with a process without environment whose parent is gone, but that is still in the agent's session.
    orphan = f"(env -i sleep 300 > /dev/null 2>&1 & echo $! > {tmp_path}/orphan)"
    messy = ["sh", "-c", f"{orphan}; exec {' '.join(SCRIPTED_AGENT)}"]
    async with running(tmp_path / "home", messy=messy) as acp:
        other = await acp.open("other", "scripted", str(tmp_path))
        session = await acp.open("s", "messy", str(tmp_path))
        hidden = HIDDEN.format(file=tmp_path / "hidden")
        stubborn = f"trap '' TERM; echo $$ > {tmp_path}/stubborn; sleep 300; true"
        text = f"ignore-eof\nleave-child 300\nrun {hidden} > /dev/null 2>&1\nrun {stubborn}"
        turn = asyncio.create_task(acp.prompt("s", session, text))
        async with acp.stream("s") as stream:
            stray = await pid_in(tmp_path / "hidden")
            tree = {await pid_in(tmp_path / name) for name in ("stubborn", "orphan")}
            left = int(stream.text.split("Left child ")[1].split(".")[0])
            tree |= {left, agent := (await acp.servers())["s"]["pid"]}
            tree |= {child.pid for child in psutil.Process(agent).children(recursive=True)}
            started = time.monotonic()
            assert (await acp.delete("s")).status == 204
            assert time.monotonic() - started < 2
            # Dead when the answer comes, not some time after it.
            assert not [pid for pid in tree if psutil.pid_exists(pid)]
            await stream.until_end()
        reply = await turn
        assert (reply.status, reply.slug) == (502, "stream_error")
        assert (await acp.prompt("other", other, "hello")).result["stopReason"] == "end_turn"
        # In a session of its own and without environment it belongs to nobody in particular; it dies with the daemon.
        assert psutil.Process(stray).ppid() == acp.daemon.process.pid
    await eventually(lambda: ended(stray))


async def test_what_a_dead_agent_leaves_is_killed(tmp_path: Path) -> None:
    async with running(tmp_path / "home") as acp:
        session = await acp.open("s", "scripted", str(tmp_path))
        turn = asyncio.create_task(acp.prompt("s", session, "leave-child 300\ncrash 1"))
        async with acp.stream("s") as stream:
            await stream.until(lambda s: s.named("_adapter/agent_exited"))
            left = int(stream.text.split("Left child ")[1].split(".")[0])
            await eventually(lambda: ended(left))
        await turn


async def test_orphans_are_reaped(tmp_path: Path) -> None:
    async with running(tmp_path / "home") as acp:
        job = {"command": "sh", "args": ["-c", "for i in 1 2 3 4 5; do (true & sleep 0.05 &) ; done"]}
        assert (await acp.call("POST", "/v1/processes/run", json=job)).body["exitCode"] == 0
        daemon = psutil.Process(acp.daemon.process.pid)
        await eventually(lambda: not daemon.children())


async def test_a_process_out_of_time_dies_with_its_children(tmp_path: Path) -> None:
    async with running(tmp_path / "home") as acp:
        script = f"setsid sh -c 'echo $$ > {tmp_path}/child; sleep 300' & sleep 300"
        job = {"command": "sh", "args": ["-c", script], "timeoutMs": 300}
        body = (await acp.call("POST", "/v1/processes/run", json=job)).body
        assert (body["timedOut"], body["exitCode"]) == (True, None)
        child = await pid_in(tmp_path / "child")
        await eventually(lambda: ended(child))


async def test_a_process_in_the_background_does_not_hold_the_answer(tmp_path: Path) -> None:
    async with running(tmp_path / "home") as acp:
        job = {"command": "sh", "args": ["-c", "echo started; sleep 300 &"], "timeoutMs": 10_000}
        body = (await acp.call("POST", "/v1/processes/run", json=job)).body
        assert (body["exitCode"], body["stdout"], body["timedOut"]) == (0, "started\n", False)
        assert body["durationMs"] < 2000


async def test_a_wrong_process_names_its_field(tmp_path: Path) -> None:
    wrong: list[tuple[object, str]] = [
        ([], "object"),
        ({"args": []}, "command"),
        ({"command": "x", "args": "y"}, "args"),
        ({"command": "x", "cwd": 1}, "cwd"),
        ({"command": "x", "env": {"a": 1}}, "env"),
        ({"command": "x", "timeoutMs": 0}, "timeoutMs"),
        ({"command": "x", "maxOutputBytes": True}, "maxOutputBytes"),
    ]
    async with running(tmp_path / "home") as acp:
        for job, field in wrong:
            reply = await acp.call("POST", "/v1/processes/run", json=job)
            assert (reply.status, reply.slug) == (400, "invalid_request")
            assert field in reply.body["detail"]
        nested = await acp.call("POST", "/v1/processes/run", data=b'{"command":' + b"[" * 100_000)
        assert (nested.status, nested.slug) == (400, "invalid_request")


async def test_what_is_no_http_is_refused_without_a_word(tmp_path: Path) -> None:
    async with running(tmp_path / "home") as acp:
        host, _, port = acp.daemon.url.removeprefix("http://").rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"GET /v1/health NONE\r\nAuthorization: Bearer secret\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.0 400")
        writer.close()
        assert (await acp.call("GET", "/v1/health")).status == 200
        assert "Traceback" not in acp.daemon.log()


async def test_files_are_replaced_as_a_whole(tmp_path: Path) -> None:
    async with running(tmp_path / "home") as acp:
        path = tmp_path / "script.sh"
        path.write_text("old")
        path.chmod(0o750)
        assert (await acp.call("PUT", "/v1/fs/file", params={"path": str(path)}, data=b"new")).status == 200
        assert (path.read_text(), path.stat().st_mode & 0o777) == ("new", 0o750)
        reply = await acp.call("PUT", "/v1/fs/file", params={"path": str(tmp_path)}, data=b"x")
        assert (reply.status, reply.slug) == (400, "invalid_request")
        below_a_file = {"path": str(path / "x")}
        for method, route in (("PUT", "file"), ("POST", "mkdir"), ("GET", "stat"), ("GET", "entries"), ("GET", "file")):
            reply = await acp.call(method, f"/v1/fs/{route}", params={"path": "a" * 5_000})
            assert (reply.status, reply.slug) == (400, "invalid_request"), route
            reply = await acp.call(method, f"/v1/fs/{route}", params=below_a_file)
            assert (reply.status, reply.slug) == (400, "invalid_request"), route
        assert (await acp.call("DELETE", "/v1/fs/file", params={"path": str(path)})).status == 200
        (tmp_path / "full" / "x").mkdir(parents=True)
        reply = await acp.call("DELETE", "/v1/fs/file", params={"path": str(tmp_path / "full")})
        assert (reply.status, reply.slug) == (400, "invalid_request")
        assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
