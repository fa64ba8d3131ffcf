"""The sandbox service as tests call it: short calls over its gRPC address, and a look at what really runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import grpc.aio
import psutil

from hearth.sandbox.v1 import sandbox_pb2, sandbox_service_pb2, sandbox_service_pb2_grpc
from hearth.types.v1 import session_pb2
from services.chassis.errors import HearthError, from_rpc_error
from tests.support.processes import MARKER as RUN_MARKER
from tests.support.processes import marker as run_marker

_R = TypeVar("_R")

PROJECT = "p1"
# In the environment of every process of a local sandbox; part of the contract between the service and the machine.
SANDBOX_MARKER = "HEARTH_SANDBOX_ID"
# Faster than in production, with the same proportions: what waits for a timer is seen within a test.
FAST = {
    "HEARTH_LEASE": "3.0",
    "HEARTH_LEASE_READ_INTERVAL": "0.2",
    "HEARTH_LEASE_GAP": "2.0",
    "HEARTH_RECONCILE_INTERVAL": "0.5",
    "HEARTH_LOOK_AGAIN": "0.1",
}


def service_environment(dsn: str, root: Path, **more: str) -> dict[str, str]:
    """What a sandbox service needs, its sandboxes below `root` and counted to this test run."""
    return {
        "HEARTH_POSTGRES_DSN": dsn,
        "HEARTH_LOCAL_ROOT": str(root),
        "HEARTH_LOCAL_INHERIT": RUN_MARKER,
        **more,
    }


def new_id() -> str:
    """A uuid as text."""
    return str(uuid.uuid4())


def claim(epoch: int, attempt: int = 1) -> sandbox_pb2.Claim:
    """A claim."""
    return sandbox_pb2.Claim(epoch=epoch, attempt=attempt)


class Sandboxes:
    """Calls to one sandbox service; errors are raised as `HearthError`."""

    def __init__(self, channel: grpc.aio.Channel, *, timeout: float = 60.0) -> None:
        self.stub = sandbox_service_pb2_grpc.SandboxServiceStub(channel)
        self._timeout = timeout

    async def acquire(
        self,
        session: str,
        epoch: int = 1,
        attempt: int = 1,
        *,
        holder: str,
        spec: sandbox_pb2.SandboxSpec | None = None,
        project: str = PROJECT,
        timeout: float | None = None,
    ) -> sandbox_service_pb2.AcquireResponse:
        """Acquire the sandbox of a session for the scripted agent, or for `spec`."""
        request = sandbox_service_pb2.AcquireRequest(
            session=session_pb2.SessionKey(project=project, session=session),
            claim=claim(epoch, attempt),
            holder=holder,
            spec=spec or sandbox_pb2.SandboxSpec(agent="scripted"),
        )
        return await self._call(self.stub.Acquire, request, timeout)

    async def release(
        self, session: str, epoch: int = 1, attempt: int = 1, *, reason: str = "CLEAN_TURN", project: str = PROJECT
    ) -> sandbox_service_pb2.ReleaseResponse:
        """Release with the reason of that name."""
        request = sandbox_service_pb2.ReleaseRequest(
            session=session_pb2.SessionKey(project=project, session=session),
            claim=claim(epoch, attempt),
            reason=sandbox_pb2.ReleaseReason.Value(f"RELEASE_REASON_{reason}"),
        )
        return await self._call(self.stub.Release, request)

    async def renew(
        self, holder: str, *claims: tuple[str, int, int], tenure: str = "ACTIVE"
    ) -> list[sandbox_pb2.RenewalResult]:
        """Renew (session, epoch, attempt) claims."""
        request = sandbox_service_pb2.RenewClaimsRequest(holder=holder)
        for session, epoch, attempt in claims:
            request.renewals.add(
                session=session_pb2.SessionKey(project=PROJECT, session=session),
                claim=claim(epoch, attempt),
                tenure=sandbox_pb2.Tenure.Value(f"TENURE_{tenure}"),
            )
        return list((await self._call(self.stub.RenewClaims, request)).results)

    async def endpoint(self, session: str, epoch: int, attempt: int = 1) -> sandbox_service_pb2.GetEndpointResponse:
        """GetEndpoint."""
        key = session_pb2.SessionKey(project=PROJECT, session=session)
        request = sandbox_service_pb2.GetEndpointRequest(session=key, claim=claim(epoch, attempt))
        return await self._call(self.stub.GetEndpoint, request)

    async def delete_workspace(self, session: str, epoch: int, attempt: int = 0) -> None:
        """DeleteWorkspace."""
        key = session_pb2.SessionKey(project=PROJECT, session=session)
        request = sandbox_service_pb2.DeleteWorkspaceRequest(session=key, claim=claim(epoch, attempt))
        await self._call(self.stub.DeleteWorkspace, request)

    async def get(self, sandbox_id: str) -> sandbox_pb2.Sandbox:
        """GetSandbox."""
        request = sandbox_service_pb2.GetSandboxRequest(sandbox_id=sandbox_id)
        return (await self._call(self.stub.GetSandbox, request)).sandbox

    async def list(self, **fields: Any) -> list[sandbox_pb2.Sandbox]:
        """ListSandboxes, all pages."""
        found: list[sandbox_pb2.Sandbox] = []
        token = ""
        while True:
            request = sandbox_service_pb2.ListSandboxesRequest(page_token=token, **fields)
            page = await self._call(self.stub.ListSandboxes, request)
            found += page.sandboxes
            token = page.next_page_token
            if not token:
                return found

    async def delete(self, sandbox_id: str) -> str:
        """DeleteSandbox; the name of the disposition."""
        request = sandbox_service_pb2.DeleteSandboxRequest(sandbox_id=sandbox_id)
        done = await self._call(self.stub.DeleteSandbox, request)
        return sandbox_pb2.Disposition.Name(done.disposition).removeprefix("DISPOSITION_")

    async def usage(self, project: str = "") -> sandbox_service_pb2.GetUsageResponse:
        """GetUsage."""
        return await self._call(self.stub.GetUsage, sandbox_service_pb2.GetUsageRequest(project=project))

    async def reconcile(self, *, confirm_unknown: bool = False) -> sandbox_service_pb2.ReconcileResponse:
        """Reconcile."""
        request = sandbox_service_pb2.ReconcileRequest(confirm_unknown=confirm_unknown)
        return await self._call(self.stub.Reconcile, request)

    async def clear(self) -> None:
        """Delete every sandbox that is left."""
        for sandbox in await self.list():
            await self.delete(sandbox.sandbox_id)

    async def _call(self, method: Callable[..., Awaitable[_R]], request: object, timeout: float | None = None) -> _R:
        try:
            return await method(request, timeout=timeout or self._timeout)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from None


@contextlib.asynccontextmanager
async def connected(address: str) -> AsyncIterator[Sandboxes]:
    """Calls to the service at `address` while the block runs."""
    async with grpc.aio.insecure_channel(address) as channel:
        yield Sandboxes(channel)


async def refused(call: Any) -> HearthError:
    """The refusal of a call that must be refused."""
    try:
        answer = await call
    except HearthError as error:
        return error
    raise AssertionError(f"it was not refused: {answer}")


def how(response: sandbox_service_pb2.AcquireResponse) -> str:
    """ATTACHED, RESTARTED or CREATED."""
    return sandbox_pb2.AcquireHow.Name(response.how).removeprefix("ACQUIRE_HOW_")


def disposition(response: sandbox_service_pb2.ReleaseResponse) -> str:
    """PARKED, STOPPED, DELETED, ORPHANED or NOTHING."""
    return sandbox_pb2.Disposition.Name(response.disposition).removeprefix("DISPOSITION_")


def state(sandbox: sandbox_pb2.Sandbox) -> str:
    """What is observed and what it is used for, as `RUNNING/ACTIVE`."""
    observed = sandbox_pb2.SandboxState.Name(sandbox.observed).removeprefix("SANDBOX_STATE_")
    return f"{observed}/{sandbox_pb2.Tenure.Name(sandbox.tenure).removeprefix('TENURE_')}"


def members(sandbox_id: str) -> list[psutil.Process]:
    """The living processes that carry the marker of a sandbox, found independently of the service."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(SANDBOX_MARKER) == sandbox_id:
                found.append(process)
    return found


class Daemon:
    """The agent daemon of a sandbox, called with the token that Acquire gave."""

    def __init__(self, session: aiohttp.ClientSession, endpoint: sandbox_pb2.Endpoint) -> None:
        self._session = session
        self._url = endpoint.url
        self._headers = {**endpoint.headers, "Authorization": f"Bearer {endpoint.token}"}

    async def health(self) -> int:
        """The HTTP status of its health; 0 when it does not answer."""
        try:
            async with self._session.get(f"{self._url}/v1/health", headers=self._headers) as response:
                return response.status
        except aiohttp.ClientError:
            return 0

    async def post(self, server: str, message: Mapping[str, Any], *, agent: str = "") -> tuple[int, bytes]:
        """POST one JSON-RPC message; status and body."""
        parameters = {"agent": agent} if agent else {}
        url = f"{self._url}/v1/acp/{server}"
        async with self._session.post(url, json=message, params=parameters, headers=self._headers) as response:
            return response.status, await response.read()

    async def run(self, command: str, *arguments: str) -> dict[str, Any]:
        """Run a command in the sandbox to its end."""
        body = {"command": command, "args": list(arguments)}
        url = f"{self._url}/v1/processes/run"
        async with self._session.post(url, json=body, headers=self._headers) as response:
            assert response.status == 200, await response.text()
            result: dict[str, Any] = await response.json()
            return result


# An agent that does everything to stay: it ignores SIGTERM and the end of its input, has a child in a session of its
# own and one that cleared its environment besides. It writes the process ids into `pids` in its directory.
STUBBORN_AGENT = """
import json, os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
signal.signal(signal.SIGHUP, signal.SIG_IGN)
apart = subprocess.Popen(["sleep", "600"], start_new_session=True)
bare = subprocess.Popen(["sleep", "600"], start_new_session=True, env={})
with open("pids.draft", "w") as file:
    json.dump([os.getpid(), apart.pid, bare.pid], file)
os.rename("pids.draft", "pids")
for line in sys.stdin:
    message = json.loads(line)
    if "id" in message:
        print(json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": {}}), flush=True)
while True:
    time.sleep(60)
"""
INITIALIZE = {"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": {"protocolVersion": 1}}


def agents_with_stubborn() -> str:
    """HEARTH_AGENTS with the agent `stubborn`."""
    return json.dumps({"stubborn": {"command": [sys.executable, "-c", STUBBORN_AGENT]}})


async def start_stubborn(daemon: Daemon, workspace: str) -> list[int]:
    """Start the stubborn agent; the ids of its three processes."""
    status, body = await daemon.post("stubborn-1", INITIALIZE, agent="stubborn")
    assert status == 200, body
    pids: list[int] = json.loads((Path(workspace) / "pids").read_text())
    assert all(alive(pid) for pid in pids)
    return pids


async def until(condition: Callable[[], Awaitable[bool]], *, seconds: float = 20.0) -> None:
    """Return when `condition` holds; AssertionError when it does not within `seconds`."""
    ends = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < ends, f"not within {seconds} s"
        await asyncio.sleep(0.02)


async def until_dead(pid: int) -> None:
    """Return when the process is gone."""

    async def dead() -> bool:
        return not alive(pid)

    await until(dead)


def alive(pid: int) -> bool:
    """Whether a process of this id lives (a zombie does not)."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def kill_below(root: Path) -> None:
    """End what runs in sandboxes below `root`: when the services of a test go, its sandboxes live on."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environment = process.environ()
            if SANDBOX_MARKER in environment and environment.get("HOME", "").startswith(str(root)):
                process.kill()
                process.wait(5)


def left_below(root: Path) -> list[str]:
    """What runs or lies around of the sandboxes below `root`, in words; empty when all were deleted."""
    left = [f"directory {path.name}" for path in root.glob("hearth-*")]
    left += [f"directory {path.name}" for path in root.glob(".trash-*")]
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            environment = process.environ() if process.status() != psutil.STATUS_ZOMBIE else {}
            ours = SANDBOX_MARKER in environment and environment.get(RUN_MARKER) == run_marker()
            # Other services of this run may keep sandboxes elsewhere.
            if ours and any(str(root) in value for value in environment.values()):
                left.append(f"pid {process.pid} of {environment[SANDBOX_MARKER]}")
    return left
