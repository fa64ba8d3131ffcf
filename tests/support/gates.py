"""The part of the pool that stands on rows alone, without an agent: a test is the turn that asks, and the people who
answer."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import grpc.aio
import pytest

from hearth.secret import Secret
from hearth.types.v1 import content_pb2, event_pb2
from services.chassis.clock import SystemClock, SystemIds
from services.chassis.errors import HearthError
from services.chassis.migrations import migrate
from services.chassis.postgres import Pool, create_pool
from services.pool.control.admission import OnBusy
from services.pool.control.commands import Aim, Commands
from services.pool.control.executions import Winner
from services.pool.control.inputs import Inputs, NewInput, Sent
from services.pool.control.interactions import Answered, Interactions, NewAnswers, NewGate
from services.pool.control.settlement import Settled, Settlement
from services.pool.control.starts import Starts
from services.pool.control.takeovers import Takeovers
from services.pool.gate_rows import AnswerRow
from services.pool.log import Log
from services.pool.rows import Command, Decision, Execution, Gate, GateKind, Key, OutboxRow
from services.pool.settings import PoolSettings
from services.pool.store import PLANNER, SCHEMA, PickedUp, Store

HOLDER = "11111111-1111-4111-8111-111111111111"
OTHER = "22222222-2222-4222-8222-222222222222"
TEXT = [content_pb2.ContentPart(text=content_pb2.TextPart(text="hello"))]

ALLOW, DENY = Decision.ALLOWED, Decision.DENIED


class Rows:
    """Turns and people on one database. `woken` are the sessions of which a commit was told."""

    def __init__(self, pool: Pool, log: Log) -> None:
        self.pool = pool
        clock, ids = SystemClock(), SystemIds()
        self.store = Store(pool)
        self.woken: list[Key] = []
        starts = Starts(clock, ids, "scripted")
        self.interactions = Interactions(self.store, starts, clock, expiry=60.0, changed=self._changed)
        self.settlement = Settlement(self.store, starts, log, clock, changed=self._changed)
        self.takeovers = Takeovers(self.store, clock, changed=self._changed)
        self.commands = Commands(self.store, clock, ids, changed=self._changed)
        self.inputs = Inputs(
            self.store,
            starts,
            clock,
            ids,
            queue_cap=10,
            changed=self._changed,
            settle_ended=self._not_ended,
        )

    async def _not_ended(self, key: Key, execution_id: str) -> bool:
        return False

    def _changed(
        self,
        key: Key,
        *,
        admitted_at: float | None = None,
        picked: PickedUp | None = None,
        facts: Sequence[OutboxRow] = (),
    ) -> None:
        self.woken.append(key)

    async def send(self, key: Key, on_busy: OnBusy = OnBusy.QUEUE, traceparent: str = "") -> Sent:
        """Send a message."""
        new = NewInput(key, str(uuid.uuid4()), b"fp", TEXT, None, None, on_busy, traceparent, 0.0)
        return await self.inputs.send(new)

    async def pick_up(self, key: Key, holder: str = HOLDER) -> PickedUp:
        """Take what waits."""
        picked = await self.store.pick_up(key, holder)
        assert picked is not None
        return picked

    async def running(self, key: Key, holder: str = HOLDER) -> Execution:
        """An execution whose agent was asked."""
        await self.send(key)
        picked = await self.pick_up(key, holder)
        assert await self.store.run(picked.execution, holder, "scripted", "session-1")
        return await self.execution(picked.execution)

    async def asking(self, key: Key, count: int = 1) -> tuple[Execution, list[Gate]]:
        """An execution whose agent has asked for so many approvals."""
        execution = await self.running(key)
        gates = await self.interactions.ask(execution, HOLDER, [approval(f"call-{one}") for one in range(count)])
        assert gates is not None
        return await self.execution(execution), gates

    async def paused(self, key: Key, count: int = 1) -> tuple[Execution, list[Gate]]:
        """The same, when the turn was paused."""
        execution, gates = await self.asking(key, count)
        await self.settle(execution, "paused")
        return await self.execution(execution), gates

    async def execution(self, execution: Execution) -> Execution:
        """An execution as it is now."""
        found = await self.store.execution(execution.key, execution.execution_id)
        assert found is not None
        return found

    async def active(self, key: Key) -> Execution | None:
        """What is under way."""
        return await self.store.active_execution(key)

    async def gates(self, *gates: Gate) -> list[Gate]:
        """Gates as they are now."""
        found = {one.interaction_id: one for one in await self.store.gates(gates[0].execution_id)}
        return [found[gate.interaction_id] for gate in gates]

    async def settle(self, execution: Execution, outcome: str) -> Settled | None:
        """Close an execution by an ending that somebody has written."""
        winner = Winner(str(uuid.uuid4()), f"execution.{outcome}", execution.epoch, 9, "AGENT_EXITED")
        return await self.settlement.settle(execution.key, execution.execution_id, winner)

    async def answer(
        self, key: Key, *answers: tuple[Gate, Decision], request_id: str = "", fingerprint: bytes = b"fp"
    ) -> Answered:
        """Answer as Ann."""
        rows = [AnswerRow(gate.interaction_id, decision, None) for gate, decision in answers]
        return await self.interactions.answer(
            NewAnswers(key, request_id or str(uuid.uuid4()), fingerprint, rows, "ann")
        )

    async def stop(self, execution: Execution) -> Command:
        """Stop this very execution."""
        aim = Aim(execution_id=execution.execution_id)
        return await self.commands.stop(execution.key, str(uuid.uuid4()), b"fp", aim)

    async def events(self, key: Key) -> list[event_pb2.Event]:
        """Everything that readers are to be told."""
        return [event_pb2.Event.FromString(row.event) for row in await self.store.outbox(key, 1000)]

    async def told(self, gate: Gate) -> list[str]:
        """What readers are told of a gate: the word of each event, with how it was closed."""
        words = []
        for event in await self.events(gate.key):
            if event.entity_id != gate.interaction_id:
                continue
            assert event.execution_id == gate.execution_id
            word = event.type.removeprefix("interaction.")
            if event.HasField("interaction_resolved"):
                name = event_pb2.InteractionResolution.Name(event.interaction_resolved.resolution)
                word = f"{name.removeprefix('INTERACTION_RESOLUTION_')} by {event.interaction_resolved.decided_by}"
            words.append(word)
        return words

    async def late(self, *gates: Gate) -> None:
        """Let the time of gates be over."""
        ids = [gate.interaction_id for gate in gates]
        await self.pool.execute(
            "UPDATE pool.gate SET expires_at = now() - interval '1 second' WHERE interaction_id = ANY ($1::uuid[])", ids
        )


def approval(call: str, input_json: str = '{"path": "a"}') -> NewGate:
    """A request for leave to run a tool."""
    return NewGate(call, f"request-{call}", GateKind.APPROVAL, "edit", input_json)


def new_key() -> Key:
    """A session."""
    return Key("p", uuid.uuid4().hex)


def states(gates: Sequence[Gate] | None) -> list[str]:
    """The states of gates that were found."""
    assert gates is not None
    return [gate.state.value for gate in gates]


async def refusal(rows: Rows, key: Key, gate: Gate) -> HearthError:
    """How an answer to a gate is refused."""
    with pytest.raises(HearthError) as caught:
        await rows.answer(key, (gate, ALLOW))
    return caught.value


async def begin(rows: Rows, key: Key, holder: str = HOLDER) -> tuple[Execution, list[Gate] | None]:
    """Pick up what waits, and let it begin."""
    picked = await rows.pick_up(key, holder)
    passed_on = await rows.interactions.begin(picked.execution, holder, "scripted", "s", picked.continued)
    return picked.execution, passed_on


@asynccontextmanager
async def rows_on(dsn: str) -> AsyncIterator[Rows]:
    """The rows of a database."""
    await migrate(Secret(dsn), SCHEMA, "services.pool")
    async with (
        await create_pool(PoolSettings(postgres_dsn=Secret(dsn)), "pool", server_settings=PLANNER) as pool,
        # Nothing here asks the log anything.
        grpc.aio.insecure_channel("127.0.0.1:1") as nowhere,
    ):
        yield Rows(pool, Log(nowhere))
