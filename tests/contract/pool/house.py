"""The four services as processes, and a backend that talks to them: what the tests of the pool stand on."""

from __future__ import annotations

import asyncio
import sys
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import grpc.aio

from hearth.channel import open_channel
from hearth.history.v1 import history_service_pb2, history_service_pb2_grpc
from hearth.pool.v1 import pool_service_pb2, pool_service_pb2_grpc
from hearth.sandbox.v1 import sandbox_pb2, sandbox_service_pb2, sandbox_service_pb2_grpc
from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.session.v1 import session_service_pb2_grpc
from hearth.types.v1 import content_pb2, event_pb2, session_pb2
from tests.support.processes import MARKER, ServiceProcess
from tests.support.sandboxes import kill_below

SERVICES = ("history", "relay", "sandbox", "pool")
DONE_SECONDS = 30.0

_T = TypeVar("_T")

ENDINGS = ("execution_completed", "execution_stopped", "execution_failed", "execution_lost", "execution_paused")


# The command of the agent that ships with Hearth.
SCRIPTED = [sys.executable, "-P", "-m", "hearth.agents.scripted"]


def agent_log_of(directory: Path) -> Path:
    """Where agents that write down what reaches them do it, of services in a directory."""
    return directory / "agents.jsonl"


class House:
    """History, relay, sandbox and pool on a database and a bus of their own; of the pool there may be more replicas,
    `pool-2` and so on."""

    def __init__(
        self,
        directory: Path,
        dsn: str,
        valkey_url: str,
        env: Mapping[str, str] | None = None,
        *,
        pools: int = 1,
    ) -> None:
        self.directory = directory
        self.dsn = dsn
        shared = {
            "HEARTH_POSTGRES_DSN": dsn,
            "HEARTH_VALKEY_URL": valkey_url,
            "HEARTH_LOCAL_ROOT": str(directory / "sandboxes"),
            # By it the end of the test run sees a sandbox that was left running.
            "HEARTH_LOCAL_INHERIT": MARKER,
            **(env or {}),
        }
        self.pools = ["pool", *(f"pool-{number}" for number in range(2, pools + 1))]
        names = [*SERVICES, *self.pools[1:]]
        self.processes = {
            name: ServiceProcess(f"services.{name.partition('-')[0]}", directory, dict(shared)) for name in names
        }

    def start_blocking(self) -> None:
        """Start all of them, the called before their callers."""
        for name, process in self.processes.items():
            for other in SERVICES:
                if other != name and self.processes[other].address != "127.0.0.1:0":
                    process.env[f"HEARTH_{other.upper()}_ADDRESS"] = self.processes[other].address
            process.start_blocking()

    def stop(self) -> None:
        """Stop all of them, callers first, and what a killed one left running in sandboxes."""
        codes = {name: process.stop() for name, process in reversed(self.processes.items()) if process.running}
        kill_below(self.directory / "sandboxes")
        assert set(codes.values()) <= {0}, codes

    @contextmanager
    def running(self) -> Iterator[House]:
        """All of them, for a block."""
        try:
            self.start_blocking()
            yield self
        finally:
            self.stop()

    @property
    def pool(self) -> ServiceProcess:
        """The pool process, or the first one of them."""
        return self.processes["pool"]

    @property
    def pool_address(self) -> str:
        """All replicas of the pool as one address."""
        return ",".join(self.processes[name].address for name in self.pools)


@contextmanager
def frozen(house: House, name: str) -> Iterator[None]:
    """A service that answers nothing for a while."""
    house.processes[name].freeze()
    try:
        yield
    finally:
        house.processes[name].thaw()


class Backend:
    """What a backend of a project does, with one call each. `pool` is the replica that it calls; empty: all of them,
    one after the other."""

    def __init__(self, house: House, *, pool: str = "pool") -> None:
        self._channels = {name: grpc.aio.insecure_channel(house.processes[name].address) for name in SERVICES[:-1]}
        if pool:
            self._channels["pool"] = grpc.aio.insecure_channel(house.processes[pool].address)
        else:
            self._channels["pool"] = open_channel(house.pool_address)
        self.sessions = session_service_pb2_grpc.SessionServiceStub(self._channels["pool"])
        self.pools = pool_service_pb2_grpc.PoolServiceStub(self._channels["pool"])
        self.history = history_service_pb2_grpc.HistoryServiceStub(self._channels["history"])
        self.sandboxes = sandbox_service_pb2_grpc.SandboxServiceStub(self._channels["sandbox"])

    async def close(self) -> None:
        """Close its channels."""
        for channel in self._channels.values():
            await channel.close()

    async def send(
        self,
        key: session_pb2.SessionKey,
        text: str,
        *,
        request_id: str = "",
        on_busy: sessions.OnBusy.ValueType = sessions.ON_BUSY_QUEUE,
        spec: sessions.SessionSpec | None = None,
        expected: sessions.ExpectedTranscript | None = None,
        files: Sequence[content_pb2.AttachmentPart] = (),
    ) -> calls.SendInputResponse:
        """Send a message: a text, which may be empty beside files."""
        request = calls.SendInputRequest(
            session=key,
            request_id=request_id or str(uuid.uuid4()),
            content=[
                *(text_content(text) if text else []),
                *(content_pb2.ContentPart(attachment=file) for file in files),
            ],
            on_busy=on_busy,
            spec=spec,
            expected_transcript=expected,
        )
        response: calls.SendInputResponse = await self.sessions.SendInput(request, timeout=20)
        return response

    async def stop(
        self,
        key: session_pb2.SessionKey,
        execution_id: str = "",
        *,
        seen_epoch: int = 0,
        request_id: str = "",
    ) -> sessions.Command:
        """Ask for a Stop."""
        request = calls.StopExecutionRequest(
            session=key,
            request_id=request_id or str(uuid.uuid4()),
            execution_id=execution_id,
            seen_epoch=seen_epoch,
        )
        response = await self.sessions.StopExecution(request, timeout=20)
        command: sessions.Command = response.command
        return command

    async def run(self, key: session_pb2.SessionKey, text: str, **more: object) -> event_pb2.Event:
        """Send a message that starts at once, and wait for its ending."""
        sent = await self.send(key, text, **more)  # type: ignore[arg-type]
        assert sent.HasField("started"), sent
        return await self.ending(key, sent.started.execution.execution_id)

    async def session(self, key: session_pb2.SessionKey) -> sessions.Session:
        """The session as it is."""
        response = await self.sessions.GetSession(calls.GetSessionRequest(session=key), timeout=20)
        found: sessions.Session = response.session
        return found

    async def execution(self, key: session_pb2.SessionKey, execution_id: str) -> sessions.Execution:
        """An execution as it is."""
        request = calls.GetExecutionRequest(session=key, execution_id=execution_id)
        found: sessions.Execution = (await self.sessions.GetExecution(request, timeout=20)).execution
        return found

    async def command(self, key: session_pb2.SessionKey, command_id: str) -> sessions.Command:
        """A command as it is."""
        request = calls.GetCommandRequest(session=key, command_id=command_id)
        found: sessions.Command = (await self.sessions.GetCommand(request, timeout=20)).command
        return found

    async def events(self, key: session_pb2.SessionKey) -> list[event_pb2.Event]:
        """The log of a session."""
        request = history_service_pb2.StreamEventsRequest(session=key)
        found: list[event_pb2.Event] = []
        async for chunk in self.history.StreamEvents(request, timeout=20):
            for item in chunk.events:
                assert item.cursor.sequence == len(found) + 1
                found.append(item.event)
        return found

    async def event(self, key: session_pb2.SessionKey, body: str) -> event_pb2.Event:
        """Wait for an event of a kind in the log: what the pool has accepted gets there a moment later."""

        async def found() -> event_pb2.Event | None:
            return next((event for event in await self.events(key) if event.HasField(body)), None)  # type: ignore[arg-type]

        return await eventually(found)

    async def ending(
        self, key: session_pb2.SessionKey, execution_id: str, *, timeout: float = DONE_SECONDS
    ) -> event_pb2.Event:
        """Wait for the ending of an execution in the log."""

        async def found() -> event_pb2.Event | None:
            endings = [event for event in await self.events(key) if is_ending(event, execution_id)]
            assert len(endings) <= 1, endings
            return endings[0] if endings else None

        return await eventually(found, timeout=timeout)

    async def settled(
        self, key: session_pb2.SessionKey, execution_id: str, *, timeout: float = DONE_SECONDS
    ) -> sessions.Execution:
        """Wait until an execution is settled."""

        async def found() -> sessions.Execution | None:
            execution = await self.execution(key, execution_id)
            return execution if execution.state == sessions.EXECUTION_STATE_TERMINAL else None

        return await eventually(found, timeout=timeout)

    async def idle_entry(self, key: session_pb2.SessionKey, *, timeout: float = DONE_SECONDS) -> object:
        """Wait until the agent of a session is parked; its entry."""
        from hearth.pool.v1 import pool_pb2

        async def found() -> object | None:
            entries = (await self.pools.ListEntries(pool_service_pb2.ListEntriesRequest())).entries
            mine = [entry for entry in entries if entry.session == key]
            return mine[0] if mine and mine[0].state == pool_pb2.ENTRY_STATE_IDLE else None

        return await eventually(found, timeout=timeout)

    async def running_sandboxes(self, key: session_pb2.SessionKey) -> list[sandbox_pb2.Sandbox]:
        """Sandboxes of a session that run, as the sandbox service knows."""
        request = sandbox_service_pb2.ListSandboxesRequest(project=key.project, session=key.session)
        found = (await self.sandboxes.ListSandboxes(request, timeout=20)).sandboxes
        return [one for one in found if one.observed == sandbox_pb2.SANDBOX_STATE_RUNNING]


async def eventually(
    look: Callable[[], Awaitable[_T | None]], *, timeout: float = DONE_SECONDS, every: float = 0.02
) -> _T:
    """Look again and again until something is found; it is returned."""
    async with asyncio.timeout(timeout):
        while True:
            found = await look()
            if found:
                return found
            await asyncio.sleep(every)


def key(name: str = "") -> session_pb2.SessionKey:
    """A session that nothing was said in."""
    return session_pb2.SessionKey(project="acme", session=f"{name or 's'}-{uuid.uuid4().hex[:12]}")


def text_content(text: str) -> list[content_pb2.ContentPart]:
    """A message of one text."""
    return [content_pb2.ContentPart(text=content_pb2.TextPart(text=text))]


def is_ending(event: event_pb2.Event, execution_id: str) -> bool:
    """Whether an event ends an execution."""
    return event.execution_id == execution_id and event.WhichOneof("body") in ENDINGS


def summary(event: event_pb2.Event) -> event_pb2.EndingSummary:
    """What an ending tells of its turn."""
    body = getattr(event, event.WhichOneof("body") or "")
    found: event_pb2.EndingSummary = body.summary
    return found


def agent_text(events: Sequence[event_pb2.Event], execution_id: str) -> str:
    """What the agent said in a turn."""
    return " ".join(
        part.text.text
        for event in events
        if event.execution_id == execution_id and event.message_completed.role == content_pb2.ROLE_AGENT
        for part in event.message_completed.content
    )
