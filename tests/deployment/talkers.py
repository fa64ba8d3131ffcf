"""People who talk to a deployment while something is done to it, and readers who follow all of it."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from dotenv import dotenv_values

from hearth.channel import open_channel
from hearth.client import text_content
from hearth.history.v1 import history_service_pb2_grpc
from hearth.pool.v1 import pool_service_pb2_grpc
from hearth.relay.v1 import relay_service_pb2_grpc
from hearth.sandbox.v1 import sandbox_service_pb2_grpc
from hearth.session.v1 import session_service_pb2 as calls
from hearth.session.v1 import session_service_pb2_grpc
from hearth.types.v1 import event_pb2, session_pb2
from hearth.watch import Watch
from tests.checkers import control, h1_ordered, h2_complete, h3_once
from tests.contract.pool.house import Backend, is_ending
from tests.deployment.placed import Placed
from tests.support.control_caller import Caller
from tests.support.control_recording import ControlRecording
from tests.support.recording import Connection, Reader, Recording, Ticks
from tests.support.waiting import eventually

PROJECT = "acme"
_TURN_SECONDS = 90.0
_AGAIN_SECONDS = 0.2


def agents(directory: Path) -> str:
    """For HEARTH_AGENTS: the scripted agent, which writes down what reaches it."""
    command = [sys.executable, "-P", "-m", "hearth.agents.scripted"]
    return json.dumps({"scripted": {"command": command, "env": {"HEARTH_SCRIPTED_LOG": str(_journal_file(directory))}}})


def journal(directory: Path) -> list[dict[str, Any]]:
    """What it wrote down."""
    file = _journal_file(directory)
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def _journal_file(directory: Path) -> Path:
    return directory / "agents.jsonl"


class Deployment(Backend):
    """Calls of a backend that finds the services as everybody does. A new one has new connections."""

    def __init__(self, placed: Placed) -> None:
        token = dotenv_values(placed.directory / ".env")["HEARTH_OPERATOR_TOKEN"] or ""
        self._channels = {
            name: open_channel(placed.address(name), token=token) for name in ("pool", "history", "relay", "sandbox")
        }
        self.sessions = session_service_pb2_grpc.SessionServiceStub(self._channels["pool"])
        self.pools = pool_service_pb2_grpc.PoolServiceStub(self._channels["pool"])
        self.history = history_service_pb2_grpc.HistoryServiceStub(self._channels["history"])
        self.sandboxes = sandbox_service_pb2_grpc.SandboxServiceStub(self._channels["sandbox"])
        self.relay = relay_service_pb2_grpc.RelayServiceStub(self._channels["relay"])


class Person:
    """Has one turn after the other in a session. `anew`: over new connections each time; else over those it began with.

    A message without an answer is sent again under its id, one that is refused is an error.
    """

    def __init__(self, placed: Placed, session: str, recording: ControlRecording, ticks: Ticks, *, anew: bool) -> None:
        self.key = session_pb2.SessionKey(project=PROJECT, session=session)
        self.reader = Reader((PROJECT, session))
        self.endings: list[event_pb2.Event] = []
        self.backend = Deployment(placed)
        self._placed = placed
        self._anew = anew
        self.caller = Caller(lambda: self.backend, lambda: journal(placed.directory))
        self.caller.recording, self.caller._ticks = recording, ticks

    async def talk(self, over: asyncio.Event) -> None:
        """Until it is over."""
        for number in itertools.count():
            if over.is_set():
                return
            if self._anew:
                before, self.backend = self.backend, Deployment(self._placed)
                await before.close()
            # Short ones, and ones that take as long as it takes to replace a service.
            text = f"turn {number}" if number % 3 else f"turn {number}\nstream 120 words at 60/s"
            request = calls.SendInputRequest(session=self.key, request_id=str(uuid.uuid4()), content=text_content(text))
            while (made := await self.caller.call(self.key, request)).response is None:
                assert not made.answered, made.error
                await asyncio.sleep(_AGAIN_SECONDS)
            assert isinstance(made.response, calls.SendInputResponse)
            execution_id = made.response.started.execution.execution_id
            await eventually(lambda: self._ended(execution_id), timeout=_TURN_SECONDS)  # noqa: B023 - used at once

    async def read(self) -> None:
        """Follow the session for good, over as many connections as that takes."""
        connections = self.reader.connections
        backend = Deployment(self._placed)
        try:
            watch = Watch(backend.relay, self.key)
            async for item in watch:
                if watch.reconnects >= len(connections):
                    read = [event for connection in connections for event in connection.events]
                    connections += [
                        Connection(read[-1].cursor if read else session_pb2.Cursor())
                        for _ in range(watch.reconnects + 1 - len(connections))
                    ]
                # A reset before anything came is of this side's own making.
                if connections[-1].items or not item.HasField("reset"):
                    connections[-1].items.append(item)
        finally:
            await backend.close()

    def last(self) -> int:
        """The newest sequence that was read."""
        return max((event.cursor.sequence for one in self.reader.connections for event in one.events), default=0)

    def _ended(self, execution_id: str) -> bool:
        found = [
            item.event
            for connection in self.reader.connections
            for item in connection.events
            if is_ending(item.event, execution_id)
        ]
        self.endings += found[:1]
        return bool(found)


class Talkers:
    """All of them; see `talking`."""

    def __init__(self, placed: Placed, count: int) -> None:
        self.recording, ticks = ControlRecording(), Ticks()
        self.people = [
            Person(placed, f"s{number}", self.recording, ticks, anew=bool(number % 2)) for number in range(count)
        ]
        self.over = asyncio.Event()
        self.tasks: list[asyncio.Task[None]] = []

    @property
    def turns(self) -> int:
        """How many have ended."""
        return sum(len(person.endings) for person in self.people)

    async def more(self, turns: int) -> None:
        """Return when everybody has had so many more."""
        wanted = [len(person.endings) + turns for person in self.people]
        await eventually(
            lambda: all(len(person.endings) >= many for person, many in zip(self.people, wanted, strict=True)),
            timeout=_TURN_SECONDS,
        )

    async def finish(self) -> dict[str, int]:
        """Let everybody end their turn, and look at everything: how many things each checker looked at.

        Raises AssertionError with all that is wrong; also for a turn that did not complete.
        """
        self.over.set()
        await asyncio.gather(*self.tasks)
        for person in self.people:
            await person.caller.look(person.key)
            log = self.recording.logs[person.key.project, person.key.session]
            await eventually(lambda: person.last() >= log.last)  # noqa: B023 - used at once
            person.reader.caught_up = True
        self.people[0].caller.take_journal()
        self.recording.settled = True
        found = control.check(self.recording)
        readers = Recording(readers=[person.reader for person in self.people], logs=self.recording.logs, settled=True)
        for name, checker in (("H1", h1_ordered), ("H2", h2_complete), ("H3", h3_once)):
            verdict = checker.check(readers)
            assert not verdict.wrong, f"{name}: " + "\n".join(verdict.wrong)
            found[f"{name} of readers"] = verdict.checked
        endings = [event for person in self.people for event in person.endings]
        bad = [event for event in endings if not event.HasField("execution_completed")]
        assert not bad, f"{len(bad)} of {len(endings)} turns did not complete: {bad[0]}"
        return found


@asynccontextmanager
async def talking(placed: Placed, count: int = 4) -> AsyncIterator[Talkers]:
    """People who talk during the block; every second one over new connections for each turn."""
    talkers = Talkers(placed, count)
    try:
        async with asyncio.TaskGroup() as group:
            reading = [group.create_task(person.read()) for person in talkers.people]
            talkers.tasks = [group.create_task(person.talk(talkers.over)) for person in talkers.people]
            yield talkers
            talkers.over.set()
            await asyncio.gather(*talkers.tasks)
            for task in reading:
                task.cancel()
    finally:
        for person in talkers.people:
            await person.backend.close()
