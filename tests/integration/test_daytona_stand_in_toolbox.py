"""Inside the stand-in's sandboxes, by the real SDK: commands, sessions, files, processes, ports through the proxy."""

from __future__ import annotations

import asyncio
import json
import shlex
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio
from daytona import (
    AsyncDaytona,
    AsyncSandbox,
    CreateSandboxFromSnapshotParams,
    DaytonaBadRequestError,
    DaytonaConflictError,
    DaytonaFileNotFoundError,
    DaytonaProcessExecutionTimeoutError,
    DaytonaProcessNotFoundError,
    DaytonaSessionEndedError,
    FileDownloadRequest,
    FileUpload,
    SessionExecuteRequest,
)

from tests.support.daytona import RunningStandIn, StandIn
from tests.support.daytona.client import connected
from tests.support.daytona.processes import marked
from tests.support.waiting import ended, eventually

# Answers with the request it saw; /stream sends an event, waits for /go, sends another.
_SERVER = """
import asyncio, json, sys
from aiohttp import web
go = asyncio.Event()
async def echo(request):
    body = await request.text()
    return web.json_response({"method": request.method, "path": request.raw_path, "body": body,
                              "headers": {k.lower(): v for k, v in request.headers.items()}})
async def stream(request):
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: 1\\n\\n")
    await go.wait()
    await response.write(b"data: 2\\n\\n")
    return response
async def release(request):
    go.set()
    return web.Response(status=204)
async def refuse(request):
    return web.Response(status=401)
app = web.Application()
app.add_routes([web.get("/stream", stream), web.post("/go", release), web.post("/v1/acp/refused", refuse),
                web.route("*", "/{path:.*}", echo)])
web.run_app(app, host=sys.argv[1], port=3000, print=None)
"""


@pytest_asyncio.fixture
async def stand_in(tmp_path: Path) -> AsyncIterator[RunningStandIn]:
    command = ["/bin/sh", "-c", 'echo "agent $*"', "agent"]
    async with StandIn.running(tmp_path / "daytona", agent_command=command) as running:
        yield running


@pytest_asyncio.fixture
async def client(stand_in: RunningStandIn) -> AsyncIterator[AsyncDaytona]:
    async with connected(stand_in) as connection:
        yield connection


@pytest_asyncio.fixture
async def sandbox(client: AsyncDaytona) -> AsyncSandbox:
    return await client.create()


async def start_server(sandbox: AsyncSandbox, client: aiohttp.ClientSession) -> tuple[str, dict[str, str]]:
    """Serve on port 3000 in a sandbox as one does in a real one: where the proxy leads, and the headers it wants."""
    await sandbox.fs.upload_file(_SERVER.encode(), "server.py")
    # On all addresses, as one does in a real sandbox.
    command = f"exec {shlex.quote(sys.executable)} server.py 0.0.0.0"
    await sandbox.process.create_session("server")
    await sandbox.process.execute_session_command("server", SessionExecuteRequest(command=command, run_async=True))
    link = await sandbox.get_preview_link(3000)
    headers = {"X-Daytona-Preview-Token": link.token}
    async with asyncio.timeout(20):
        while True:
            async with client.get(f"{link.url}/ready", headers=headers) as response:
                if response.status == 200:
                    return link.url, headers
            await asyncio.sleep(0.02)


async def test_a_command_runs_in_the_sandbox(sandbox: AsyncSandbox) -> None:
    done = await sandbox.process.exec("pwd; echo $DAYTONA_SANDBOX_ID; echo $X; echo oops >&2; exit 3", env={"X": "x"})
    home = await sandbox.get_user_home_dir()
    assert (done.exit_code, done.result) == (3, f"{home}\n{sandbox.id}\nx\noops\n")
    assert (await sandbox.process.exec("pwd", cwd="/")).result == "/\n"
    assert (await sandbox.process.exec("kill -9 $$")).exit_code == -1
    assert (await sandbox.process.exec("sandbox-agent server --port 1")).result == "agent server --port 1\n"


async def test_a_command_is_over_when_nobody_holds_its_output(sandbox: AsyncSandbox, tmp_path: Path) -> None:
    fifo = tmp_path / "fifo"
    await sandbox.process.exec(f"mkfifo {fifo}")
    holding = asyncio.create_task(sandbox.process.exec(f"cat {fifo} &"))
    # The same with its output elsewhere comes back at once, and meanwhile the other has not.
    await sandbox.process.exec("sleep 1000 >log 2>&1 &")
    assert not holding.done()
    await sandbox.process.exec(f"echo go > {fifo}")
    assert (await holding).result == "go\n"


async def test_a_command_that_takes_too_long_is_ended(sandbox: AsyncSandbox) -> None:
    with pytest.raises(DaytonaProcessExecutionTimeoutError):
        await sandbox.process.exec("echo $$ > pid; sleep 1000 & wait", timeout=1)
    pid = int((await sandbox.fs.download_file("pid")).decode())
    await eventually(lambda: ended(pid))


async def test_who_kills_all_but_its_own_ancestors_leaves_the_sandbox_running(
    sandbox: AsyncSandbox, stand_in: RunningStandIn
) -> None:
    await sandbox.process.exec("setsid sleep 1000 >/dev/null 2>&1 &")
    await sandbox.process.exec("env -i setsid sleep 1001 >/dev/null 2>&1 &")
    script = """
import os, signal
def environ(pid):
    try: return open(f"/proc/{pid}/environ", "rb").read().split(b"\\0")
    except OSError: return []
def parent(pid):
    try: return int(open(f"/proc/{pid}/stat", "rb").read().rpartition(b")")[2].split()[1])
    except OSError: return 0
mark = f"DAYTONA_SANDBOX_ID={os.environ['DAYTONA_SANDBOX_ID']}".encode()
pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
marked = {pid for pid in pids if mark in environ(pid)}
spared, pid = set(), os.getpid()
while pid: spared.add(pid); pid = parent(pid)
def ours(pid):
    while pid:
        if pid in marked: return True
        pid = parent(pid)
    return False
for pid in pids:
    if ours(pid) and pid not in spared: os.kill(pid, signal.SIGKILL); print(pid)
"""
    await sandbox.fs.upload_file(script.encode(), "kill.py")
    done = await sandbox.process.exec(f"{shlex.quote(sys.executable)} kill.py")
    assert len(done.result.split()) == 2, done.result
    base = stand_in.sandbox(sandbox.id).base
    assert base is not None
    await eventually(lambda: marked(sandbox.id) == {base.pid})
    assert (await sandbox.process.exec("echo alive")).result == "alive\n"


async def test_who_kills_the_base_breaks_the_sandbox(sandbox: AsyncSandbox, stand_in: RunningStandIn) -> None:
    await sandbox.process.exec("setsid sleep 1000 >/dev/null 2>&1 &")
    stand_in.kill(sandbox.id)
    await eventually(lambda: stand_in.sandbox(sandbox.id).state == "error")
    assert stand_in.running() == 0
    assert not marked(sandbox.id)
    with pytest.raises(DaytonaBadRequestError, match="Is the Sandbox started"):
        await sandbox.process.exec("true")
    await sandbox.recover(timeout=20)
    assert (await sandbox.process.exec("echo alive")).result == "alive\n"


async def test_a_session_keeps_its_shell(sandbox: AsyncSandbox) -> None:
    run = sandbox.process.execute_session_command
    await sandbox.process.create_session("one")
    with pytest.raises(DaytonaConflictError):
        await sandbox.process.create_session("one")
    await run("one", SessionExecuteRequest(command="cd /; export X=x"))
    done = await run("one", SessionExecuteRequest(command="pwd; echo $X; echo oops >&2; (exit 4)"))
    assert (done.exit_code, done.stdout, done.stderr) == (4, "/\nx\n", "oops\n")
    shown = await sandbox.process.get_session("one")
    assert [command.exit_code for command in shown.commands] == [0, 4]
    assert [session.session_id for session in await sandbox.process.list_sessions()] == ["one"]
    with pytest.raises(DaytonaProcessNotFoundError):
        await sandbox.process.get_session("other")


async def test_a_session_command_goes_on_while_its_output_is_followed(sandbox: AsyncSandbox) -> None:
    await sandbox.process.create_session("one")
    begun = await sandbox.process.execute_session_command(
        "one", SessionExecuteRequest(command="echo begun; read line; echo got $line >&2", run_async=True)
    )
    assert (await sandbox.process.get_session_command("one", begun.cmd_id)).exit_code is None
    heard: list[tuple[str, str]] = []
    following = asyncio.create_task(
        sandbox.process.get_session_command_logs_async(
            "one", begun.cmd_id, lambda text: heard.append(("out", text)), lambda text: heard.append(("err", text))
        )
    )
    await eventually(lambda: ("out", "begun\n") in heard)
    await sandbox.process.send_session_command_input("one", begun.cmd_id, "word\n")
    await following
    assert heard == [("out", "begun\n"), ("err", "got word\n")]
    assert (await sandbox.process.get_session_command("one", begun.cmd_id)).exit_code == 0
    logs = await sandbox.process.get_session_command_logs("one", begun.cmd_id)
    assert (logs.stdout, logs.stderr) == ("begun\n", "got word\n")


async def test_a_deleted_session_takes_its_processes_with_it(sandbox: AsyncSandbox) -> None:
    await sandbox.process.create_session("one")
    command = "echo $$ > pid; exec sleep 1000"
    await sandbox.process.execute_session_command("one", SessionExecuteRequest(command=command, run_async=True))
    pid = 0
    while not pid:
        found = await sandbox.process.exec("cat pid 2>/dev/null")
        pid = int(found.result or 0)
    await sandbox.process.delete_session("one")
    assert ended(pid)


async def test_a_session_whose_shell_ended_takes_no_command(sandbox: AsyncSandbox) -> None:
    await sandbox.process.create_session("one")
    done = await sandbox.process.execute_session_command("one", SessionExecuteRequest(command="exec false"))
    assert done.exit_code == 1
    with pytest.raises(DaytonaSessionEndedError):
        await sandbox.process.execute_session_command("one", SessionExecuteRequest(command="true"))


async def test_files_go_in_and_out(sandbox: AsyncSandbox, tmp_path: Path) -> None:
    odd = 'a dir/ü "quoted" %41.bin'
    content = bytes(range(256)) * 1000
    await sandbox.fs.upload_files([FileUpload(content, odd), FileUpload(b"two", str(tmp_path / "two"))])
    assert (tmp_path / "two").read_bytes() == b"two"
    assert await sandbox.fs.download_file(odd) == content
    shown = await sandbox.fs.get_file_info(odd)
    assert (shown.size, shown.is_dir) == (len(content), False)
    assert [entry.name for entry in await sandbox.fs.list_files("a dir")] == [Path(odd).name]
    several = await sandbox.fs.download_files([FileDownloadRequest(source=odd), FileDownloadRequest(source="missing")])
    assert several[0].result == content
    assert several[1].error is not None
    with pytest.raises(DaytonaFileNotFoundError):
        await sandbox.fs.download_file("missing")
    await sandbox.fs.create_folder("made", "700")
    await sandbox.fs.move_files(odd, "made/moved")
    await sandbox.fs.set_file_permissions("made/moved", mode="600")
    assert (await sandbox.process.exec("stat -c %a made made/moved")).result == "700\n600\n"
    with pytest.raises(DaytonaBadRequestError):
        await sandbox.fs.delete_file("made")
    await sandbox.fs.delete_file("made", recursive=True)
    assert (await sandbox.process.exec("ls")).result == "a dir\n"


async def test_the_proxy_leads_to_a_port_for_the_token_only(
    client: AsyncDaytona, sandbox: AsyncSandbox, stand_in: RunningStandIn
) -> None:
    other = await client.create()
    async with aiohttp.ClientSession() as http:
        # The same port in two sandboxes.
        await start_server(other, http)
        url, headers = await start_server(sandbox, http)
        for wrong in ({}, {"X-Daytona-Preview-Token": "wrong"}):
            async with http.get(url, headers=wrong) as response:
                assert (response.status, (await response.json())["source"]) == (401, "DAYTONA_PROXY")
        async with http.get(f"{url}/?DAYTONA_SANDBOX_AUTH_KEY={headers['X-Daytona-Preview-Token']}&a=b") as response:
            assert (await response.json())["path"] == "/?a=b"
        sent = {**headers, "Authorization": "Bearer mine"}
        async with http.put(f"{url}/a%2Fb?c=%20d", data=b"x" * 100_000, headers=sent) as response:
            seen = await response.json()
        assert (seen["method"], seen["path"], seen["body"]) == ("PUT", "/a%2Fb?c=%20d", "x" * 100_000)
        assert seen["headers"]["authorization"] == "Bearer mine"
        assert "x-daytona-preview-token" not in seen["headers"]

        signed = await sandbox.create_signed_preview_url(3000, expires_in_seconds=60)
        async with http.get(f"{signed.url}/x") as response:
            assert response.status == 200
        await sandbox.expire_signed_preview_url(3000, signed.token)
        async with http.get(f"{signed.url}/x") as response:
            assert response.status == 404

        closed = await sandbox.get_preview_link(3001)
        async with http.get(closed.url, headers={"X-Daytona-Preview-Token": closed.token}) as response:
            assert response.status == 502
        await sandbox.stop(timeout=20)
        async with http.get(url, headers=headers) as response:
            assert (response.status, (await response.json())["code"]) == (400, "SANDBOX_NOT_RUNNING")
        await sandbox.start(timeout=20)
        # Processes do not survive a stop, and the token is another.
        async with http.get(url, headers=headers) as response:
            assert response.status == 401
        assert (await sandbox.get_preview_link(3000)).token != headers["X-Daytona-Preview-Token"]


async def test_the_proxy_passes_streams_on_as_they_come(sandbox: AsyncSandbox) -> None:
    async with aiohttp.ClientSession() as http:
        url, headers = await start_server(sandbox, http)
        async with http.get(f"{url}/stream", headers=headers) as response:
            assert response.content_type == "text/event-stream"
            assert await response.content.readline() == b"data: 1\n"
            async with http.post(f"{url}/go", headers=headers) as released:
                assert released.status == 204
            assert (await response.content.read()).strip() == b"data: 2"


async def test_a_stream_breaks_when_its_sandbox_stops(sandbox: AsyncSandbox) -> None:
    async with aiohttp.ClientSession() as http:
        url, headers = await start_server(sandbox, http)
        async with http.get(f"{url}/stream", headers=headers) as response:
            assert await response.content.readline() == b"data: 1\n"
            await sandbox.stop(timeout=20)
            with pytest.raises(aiohttp.ClientError):
                await response.content.read()


async def test_the_log_tells_who_accepted_harness_traffic(client: AsyncDaytona, stand_in: RunningStandIn) -> None:
    labels = {"hearth-project": "p", "hearth-session": "s"}
    async with aiohttp.ClientSession() as http:
        first, second = [await client.create(CreateSandboxFromSnapshotParams(labels=labels)) for _ in range(2)]
        for number, one in enumerate((first, second)):
            url, headers = await start_server(one, http)
            message = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "session/prompt"})
            for path in ("refused", f"server{number}"):
                async with http.post(f"{url}/v1/acp/{path}", data=message, headers=headers) as response:
                    await response.read()
        entries = stand_in.log.of("harness", harness=True)
        assert [(entry.sandbox, entry.session, entry.data["call"], entry.data["accepted"]) for entry in entries] == [
            (one.id, "p/s", "session/prompt", accepted) for one in (first, second) for accepted in (False, True)
        ]
        assert stand_in.overlaps() == []

        # The first again, after the second: both were open at once.
        link = await first.get_preview_link(3000)
        token = {"X-Daytona-Preview-Token": link.token}
        async with http.post(f"{link.url}/v1/acp/server0", data="{}", headers=token) as response:
            await response.read()
        (found,) = stand_in.overlaps()
        assert (found.session, found.first.sandbox, found.second.sandbox) == ("p/s", first.id, second.id)
