"""A person in front of one session with a real agent: says things, answers what is asked, presses Stop."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

import grpc.aio

from hearth.pool.v1 import pool_service_pb2
from hearth.relay.v1 import relay_service_pb2, relay_service_pb2_grpc
from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import content_pb2, event_pb2
from tests.contract.pool.house import Backend, House, agent_text, eventually, is_ending, key, summary
from tests.contract.pool.people import answer, interactions

ALLOWED, DENIED = event_pb2.DECISION_ALLOWED, event_pb2.DECISION_DENIED
# Real agents start slowly on a busy machine.
SECONDS = 120.0


@dataclasses.dataclass(frozen=True, slots=True)
class Turn:
    """A turn that is over: its ending, its events, and what it asked for."""

    ending: event_pb2.Event
    events: Sequence[event_pb2.Event]
    asked: Sequence[sessions.Interaction]

    @property
    def kind(self) -> str:
        """`completed`, `stopped`, `failed` …"""
        return (self.ending.WhichOneof("body") or "").removeprefix("execution_")

    @property
    def how(self) -> str:
        """`cold`, `warm` or `restarted`."""
        return summary(self.ending).how

    @property
    def seconds(self) -> float:
        """From its start to its ending."""
        started = next(event for event in self.events if event.HasField("execution_started"))
        return self.ending.occurred_at.ToNanoseconds() / 1e9 - started.occurred_at.ToNanoseconds() / 1e9

    @property
    def opened(self) -> str:
        """How the agent's session was opened: `new`, `load` or `continue`."""
        return next(stage.how for stage in summary(self.ending).stages if stage.stage == "open")

    @property
    def text(self) -> str:
        """What the agent said."""
        return agent_text(self.events, self.ending.execution_id)

    @property
    def tools(self) -> list[event_pb2.ToolCompleted]:
        """Its tool calls."""
        return [event.tool_completed for event in self.events if event.HasField("tool_completed")]


class Meet(Protocol):
    """Opens a session with an agent, with these fields in its spec."""

    def __call__(self, **spec: Any) -> Person: ...


class Person:
    """See the module."""

    def __init__(self, house: House, spec: sessions.SessionSpec) -> None:
        self.key = key(spec.agent)
        self.spec = spec
        self.backend = Backend(house)
        self._house = house

    async def close(self) -> None:
        """Leave nothing of the session running."""
        await self.backend.sessions.KillSession(
            calls.KillSessionRequest(session=self.key, request_id=str(uuid.uuid4())), timeout=60
        )
        await self.backend.close()

    async def say(self, text: str, decision: event_pb2.Decision.ValueType = ALLOWED) -> Turn:
        """A whole turn; all that is asked meanwhile gets this decision."""
        return await self.until_the_end(await self.send(text), decision)

    async def send(self, text: str, *, extra: Sequence[content_pb2.ContentPart] = ()) -> str:
        """Send a message; the id of the execution that it starts."""
        request = calls.SendInputRequest(
            session=self.key,
            request_id=str(uuid.uuid4()),
            content=[*extra, content_pb2.ContentPart(text=content_pb2.TextPart(text=text))],
            spec=self.spec,
        )
        sent = await self.backend.sessions.SendInput(request, timeout=30)
        assert sent.HasField("started"), sent
        execution_id: str = sent.started.execution.execution_id
        return execution_id

    async def until_the_end(self, execution_id: str, decision: event_pb2.Decision.ValueType = ALLOWED) -> Turn:
        """Answer what is asked until the turn ends."""
        given: set[str] = set()

        async def ended() -> event_pb2.Event | None:
            for one in await self._open(execution_id):
                if one.interaction_id not in given:
                    given.add(one.interaction_id)
                    await answer(self.backend, self.key, {one.interaction_id: decision})
            found = [event for event in await self.events(execution_id) if is_ending(event, execution_id)]
            return found[0] if found else None

        ending = await eventually(ended, timeout=SECONDS, every=0.1)
        await self.backend.settled(self.key, execution_id, timeout=SECONDS)
        questions = [one for one in await interactions(self.backend, self.key) if one.execution_id == execution_id]
        return Turn(ending, await self.events(execution_id), questions)

    async def stop(self, execution_id: str) -> Turn:
        """Press Stop, and wait for what comes of it."""
        await self.backend.stop(self.key, execution_id)
        return await self.until_the_end(execution_id)

    async def allow(self, execution_id: str) -> None:
        """Allow the first thing that is asked."""

        async def one() -> sessions.Interaction | None:
            found = await self._open(execution_id)
            return found[0] if found else None

        question = await eventually(one, timeout=SECONDS, every=0.1)
        await answer(self.backend, self.key, {question.interaction_id: ALLOWED})

    async def hears(self, words: str) -> None:
        """Wait until the answer that is being written has these words in it."""
        channel = grpc.aio.insecure_channel(self._house.processes["relay"].address)
        heard = ""
        try:
            async with asyncio.timeout(SECONDS):
                request = relay_service_pb2.SubscribeRequest(session=self.key)
                reading = relay_service_pb2_grpc.RelayServiceStub(channel).Subscribe(request)
                async for response in reading:
                    heard += "".join(item.frame.frame.text_delta.text for item in response.items)
                    if words in heard:
                        break
                reading.cancel()
        finally:
            await channel.close()

    async def forget(self) -> None:
        """Have the agent that is kept for the session closed, and its sandbox stopped."""
        await self.backend.idle_entry(self.key, timeout=SECONDS)
        request = pool_service_pb2.EvictEntryRequest(session=self.key, request_id=str(uuid.uuid4()))
        await self.backend.pools.EvictEntry(request, timeout=60)

        async def stopped() -> bool:
            return not await self.backend.running_sandboxes(self.key)

        await eventually(stopped, timeout=SECONDS)

    async def events(self, execution_id: str) -> list[event_pb2.Event]:
        """The log of a turn."""
        return [event for event in await self.backend.events(self.key) if event.execution_id == execution_id]

    async def said(self) -> list[str]:
        """All messages of the agent, of whatever turn."""
        found = [event.message_completed for event in await self.backend.events(self.key)]
        return [
            "".join(part.text.text for part in message.content)
            for message in found
            if message.role == content_pb2.ROLE_AGENT
        ]

    async def _open(self, execution_id: str) -> list[sessions.Interaction]:
        return [
            one
            for one in await interactions(self.backend, self.key)
            if one.execution_id == execution_id and one.state == sessions.INTERACTION_STATE_PENDING
        ]
