"""The outbox against a real history: facts in order and once, endings that settle, and rows that history refuses."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Coroutine, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

import grpc.aio
import pytest
import pytest_asyncio

from hearth.history.v1 import history_pb2, history_service_pb2, history_service_pb2_grpc
from hearth.producer import Producer
from hearth.secret import Secret
from hearth.session.v1 import session_pb2 as sessions
from hearth.types.v1 import content_pb2, event_pb2
from services.chassis.clock import SystemClock, SystemIds
from services.chassis.migrations import migrate
from services.chassis.postgres import create_pool
from services.pool.control import facts
from services.pool.control.admission import OnBusy
from services.pool.control.executions import Winner
from services.pool.control.inputs import Inputs, NewInput
from services.pool.control.outbox import Outbox
from services.pool.control.settlement import Settlement
from services.pool.control.starts import Starts
from services.pool.control.takeovers import Takeovers
from services.pool.log import Log
from services.pool.rows import ExecutionState, Fact, Key, OutboxRow, Outcome
from services.pool.settings import PoolSettings
from services.pool.store import PLANNER, SCHEMA, PickedUp, Store
from tests.support.processes import ServiceProcess
from tests.support.servers import Servers

NOW = datetime(2026, 1, 1, tzinfo=UTC)
TEXT = [content_pb2.ContentPart(text=content_pb2.TextPart(text="hello"))]


class Control:
    """The part of the pool that stands on rows alone, and the history that it tells."""

    def __init__(self, store: Store, producer: Producer, channel: grpc.aio.Channel) -> None:
        self.clock, self.ids = SystemClock(), SystemIds()
        self.store, self.producer = store, producer
        self.history = history_service_pb2_grpc.HistoryServiceStub(channel)
        self.tasks: set[asyncio.Task[Any]] = set()
        # What was handed over with each commit, and who picks up what is admitted.
        self.changes: list[tuple[PickedUp | None, list[OutboxRow]]] = []
        self.driver: str | None = None
        starts = Starts(self.clock, self.ids, "scripted")
        self.settlement = Settlement(store, starts, Log(channel), self.clock, changed=self._changed)
        self.outbox = Outbox(store, producer, self.clock, settle=self.settlement.settle, spawn=self._spawn)
        self.takeovers = Takeovers(store, self.clock, changed=self._changed)
        self.inputs = Inputs(
            store,
            starts,
            self.clock,
            self.ids,
            queue_cap=10,
            changed=self._changed,
            settle_ended=self.settlement.settle_ended,
            driver=lambda: self.driver,
        )

    def _changed(
        self,
        key: Key,
        *,
        admitted_at: float | None = None,
        picked: PickedUp | None = None,
        facts: Sequence[OutboxRow] = (),
    ) -> None:
        self.changes.append((picked, list(facts)))

    def _spawn(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[Any]:
        task = asyncio.create_task(work, name=name)
        self.tasks.add(task)
        return task

    async def send(self, key: Key, request_id: str = "r") -> str:
        """An execution that was admitted; its id."""
        sent = await self.inputs.send(NewInput(key, request_id, b"fp", TEXT, None, None, OnBusy.QUEUE, "", 0.0))
        assert sent.execution is not None
        return sent.execution.execution_id

    async def tell(self, key: Key, *told: Fact) -> None:
        """Facts that something made true."""
        async with self.store.changing(key, make=True) as changing:
            assert changing is not None
            changing.tell(*told)

    async def append(self, key: Key, *events: event_pb2.Event) -> list[history_pb2.AppendResult]:
        """Append beside the outbox, as somebody else would."""
        sets = [history_pb2.AppendSet(session=key.message(), events=events)]
        answer = await self.history.AppendEvents(history_service_pb2.AppendEventsRequest(sets=sets))
        return list(answer.sets[0].results)

    async def events(self, key: Key) -> list[event_pb2.Event]:
        """The log."""
        page = await self.history.ReadEvents(history_service_pb2.ReadEventsRequest(session=key.message()))
        return [item.event for item in page.events]

    async def execution(self, key: Key, execution_id: str) -> Any:
        """The row."""
        return await self.store.execution(key, execution_id)

    async def waiting(self, key: Key) -> list[str]:
        """Types of the facts that wait."""
        rows = await self.store.outbox(key, 100)
        return [event_pb2.Event.FromString(row.event).type for row in rows]

    async def all_told(self, key: Key) -> None:
        """Everything told, and forgotten."""
        await self.outbox.told(key)
        # A line ends once its facts are forgotten.
        await asyncio.gather(*self.tasks)


@pytest.fixture(scope="module")
def history(servers: Servers, module_postgres_dsn: str, module_valkey_url: str) -> Iterator[ServiceProcess]:
    """A history process."""
    env = {"HEARTH_POSTGRES_DSN": module_postgres_dsn, "HEARTH_VALKEY_URL": module_valkey_url}
    process = ServiceProcess("services.history", servers.scratch(), env)
    process.start_blocking()
    yield process
    process.stop()


@pytest_asyncio.fixture
async def control(history: ServiceProcess, module_postgres_dsn: str) -> AsyncIterator[Control]:
    """The control part on the module's database."""
    await migrate(Secret(module_postgres_dsn), SCHEMA, "services.pool")
    settings = PoolSettings(postgres_dsn=Secret(module_postgres_dsn))
    async with (
        await create_pool(settings, "pool", server_settings=PLANNER) as pool,
        grpc.aio.insecure_channel(history.address) as channel,
        grpc.aio.insecure_channel("127.0.0.1:1") as nowhere,
    ):
        producer = Producer(history=channel, relay=nowhere, clock=SystemClock())
        await producer.start()
        found = Control(Store(pool), producer, channel)
        yield found
        await producer.close(1.0)
        for task in found.tasks:
            task.cancel()
        await asyncio.gather(*found.tasks, return_exceptions=True)


def new_key() -> Key:
    """A session."""
    return Key("p", uuid.uuid4().hex)


async def test_facts_are_told_in_order_once_and_forgotten(control: Control) -> None:
    key = new_key()
    execution_id = await control.send(key)
    for number in range(3):
        await control.inputs.send(NewInput(key, f"q{number}", b"fp", TEXT, None, None, OnBusy.QUEUE, "", 0.0))
    assert len(await control.waiting(key)) == 5
    await control.all_told(key)
    assert await control.waiting(key) == []
    told = await control.events(key)
    assert [event.type for event in told] == ["execution.started", "message.completed", *["input.queued"] * 3]
    assert told[0].execution_id == execution_id
    session = await control.store.session(key)
    assert session is not None
    assert session.history_sequence == 5


async def test_n40_a_crash_between_the_answer_and_the_forgetting_tells_nothing_twice(control: Control) -> None:
    key = new_key()
    await control.send(key)
    rows = await control.store.outbox(key, 10)
    await control.append(key, *(event_pb2.Event.FromString(row.event) for row in rows))
    await control.all_told(key)
    assert await control.waiting(key) == []
    assert len(await control.events(key)) == 2


async def test_an_ending_of_the_pool_settles_and_promotes_nothing(control: Control) -> None:
    key = new_key()
    execution_id = await control.send(key)
    await control.inputs.send(NewInput(key, "q", b"fp", TEXT, None, None, OnBusy.QUEUE, "", 0.0))
    execution = await control.execution(key, execution_id)
    holder = "11111111-1111-4111-8111-111111111111"
    await control.store.pick_up(key, holder)
    await control.store.count_try(execution, holder, 2)
    picked = await control.execution(key, execution_id)
    assert picked.tries == 3
    taken = await control.takeovers.take(picked, why="the test says so")
    assert taken is not None
    # Whoever saw an older row takes nothing.
    assert await control.takeovers.take(execution, why="too late") is None
    await control.all_told(key)
    settled = await control.execution(key, execution_id)
    assert (settled.state, settled.outcome, settled.failure_code) == (
        ExecutionState.TERMINAL,
        Outcome.FAILED,
        "START_FAILED",
    )
    assert settled.ending_sequence == len(await control.events(key))
    session = await control.store.session(key)
    assert session is not None
    assert session.queue_paused


async def test_n47_the_ending_that_came_first_counts(control: Control) -> None:
    """A runner whose ending is in the log has won, whatever the pool wanted to say afterwards."""
    key = new_key()
    execution_id = await control.send(key)
    await control.all_told(key)
    first = event_pb2.Event(
        event_id=str(uuid.uuid4()),
        scope=event_pb2.EVENT_SCOPE_RUNNER,
        type="execution.completed",
        entity_id=execution_id,
        execution_id=execution_id,
        epoch=1,
        execution_completed=event_pb2.ExecutionCompleted(finish_reason="end_turn"),
    )
    first.execution_completed.summary.manifest.SetInParent()
    await control.append(key, first)
    holder = "11111111-1111-4111-8111-111111111111"
    picked = await control.store.pick_up(key, holder)
    assert picked is not None
    assert await control.store.run(picked.execution, holder, "scripted", "s1")
    row = await control.execution(key, execution_id)
    assert await control.takeovers.take(row, why="it is gone") is not None
    await control.all_told(key)
    settled = await control.execution(key, execution_id)
    assert settled.outcome is Outcome.COMPLETED
    assert [event.type for event in await control.events(key)][-1] == "execution.completed"


async def test_what_history_refuses_is_marked_told_and_holds_up_nothing(control: Control) -> None:
    key = new_key()
    bad = event_pb2.Event(
        event_id=str(uuid.uuid4()), scope=event_pb2.EVENT_SCOPE_SESSION, type="input.removed", entity_id="x"
    )
    bad.input_removed.SetInParent()
    large = facts.input_queued(
        str(uuid.uuid4()), [content_pb2.ContentPart(text=content_pb2.TextPart(text="x" * (1024 * 1024)))], NOW
    )
    good = facts.input_removed(str(uuid.uuid4()), "user", NOW)
    await control.tell(key, Fact(bad.event_id, bad.SerializeToString()), large, good)
    await control.all_told(key)
    told = await control.events(key)
    assert [event.type for event in told] == ["input.removed", "history.incomplete", "history.incomplete"]
    assert {told[1].entity_id, told[2].entity_id} == {bad.event_id, large.event_id}
    assert await control.waiting(key) == []


async def test_a_refused_start_fails_the_execution(control: Control) -> None:
    key = new_key()
    execution_id = await control.send(key)
    rows = await control.store.outbox(key, 10)
    started = event_pb2.Event.FromString(rows[0].event)
    started.execution_started.agent = "another"
    # The same id with other content: as after a defect, or a log that somebody else wrote.
    await control.append(key, started)
    await control.all_told(key)
    settled = await control.execution(key, execution_id)
    assert (settled.outcome, settled.failure_code) == (Outcome.FAILED, "HISTORY_UNAVAILABLE")
    assert settled.ending_sequence == 0
    await control.send(key, "again")


async def test_an_ending_that_counts_too_much_is_told_as_incomplete(control: Control) -> None:
    key = new_key()
    execution_id = await control.send(key)
    ending = event_pb2.Event.FromString(facts.stopped(execution_id, 1, reason="user", command_id=None, at=NOW).event)
    ending.execution_stopped.summary.manifest.runner_events = 5
    async with control.store.changing(key) as changing:
        assert changing is not None
        await changing.end_by_pool(execution_id, ExecutionState.STOPPING, ending.event_id, epoch=1)
        changing.tell(Fact(ending.event_id, ending.SerializeToString(), execution_id, facts.ENDED))
    await control.all_told(key)
    last = (await control.events(key))[-1]
    assert last.execution_stopped.summary.manifest.incomplete
    assert (await control.execution(key, execution_id)).outcome is Outcome.STOPPED


async def test_a_log_that_is_ahead_is_stepped_over(control: Control) -> None:
    """The pool's database was restored: its epochs are behind what history has seen."""
    key = new_key()
    other = str(uuid.uuid4())
    stranger = event_pb2.Event.FromString(
        facts.started(other, 40, input_id=None, agent="scripted", model="", at=NOW).event
    )
    await control.append(key, stranger)
    execution_id = await control.send(key)
    await control.all_told(key)
    row = await control.execution(key, execution_id)
    assert row.epoch == 41
    last = [event for event in await control.events(key) if event.HasField("execution_started")][-1]
    assert (last.execution_id, last.epoch) == (execution_id, 41)
    session = await control.store.session(key)
    assert session is not None
    assert session.epoch == 41


async def test_n43_history_away_keeps_the_facts(control: Control, history: ServiceProcess) -> None:
    key = new_key()
    await control.send(key)
    history.kill9()
    told = control.outbox.told(key)
    await asyncio.sleep(1)
    assert not told.done()
    await control.inputs.send(NewInput(key, "q", b"fp", TEXT, None, None, OnBusy.QUEUE, "", 0.0))
    await history.start()
    await told
    await control.all_told(key)
    assert [event.type for event in await control.events(key)] == [
        "execution.started",
        "message.completed",
        "input.queued",
    ]


async def test_of_many_settlements_one_promotes(control: Control) -> None:
    key = new_key()
    execution_id = await control.send(key)
    for number in range(2):
        await control.inputs.send(NewInput(key, f"q{number}", b"fp", TEXT, None, None, OnBusy.QUEUE, "", 0.0))
    winner = Winner(str(uuid.uuid4()), "execution.completed", 1, 3)
    settled = await asyncio.gather(*(control.settlement.settle(key, execution_id, winner) for _ in range(8)))
    firsts = [one for one in settled if one is not None and one.first]
    assert len(firsts) == 1
    promoted = [one.promoted.execution_id for one in settled if one is not None and one.promoted is not None]
    assert len(promoted) == 1
    active = await control.store.active_execution(key)
    assert active is not None
    assert active.execution_id == promoted[0]
    assert len(await control.store.queue(key, offset=0, limit=10)) == 1


async def test_facts_that_are_handed_over_are_told_behind_those_that_wait(control: Control) -> None:
    key = new_key()
    await control.send(key)
    await control.all_told(key)
    # What was committed and handed to nobody waits before what is.
    await control.tell(key, facts.input_removed(str(uuid.uuid4()), "user", NOW))
    for request_id in ("second", "third"):
        await control.inputs.send(
            NewInput(key, request_id, request_id.encode(), TEXT, None, None, OnBusy.QUEUE, "", 0.0)
        )
    (_, second), (_, third) = control.changes[-2:]
    await control.outbox.told(key, third)
    await control.outbox.told(key, second)
    await control.all_told(key)
    types = [event.type for event in await control.events(key)]
    assert types == ["execution.started", "message.completed", "input.removed", "input.queued", "input.queued"]
    assert await control.waiting(key) == []


async def test_who_hands_nothing_over_is_not_answered_by_the_facts_of_another(control: Control) -> None:
    """A queued message and a promotion at once: the turn must not begin to speak before its start is in the log."""
    key = Key("acme", str(uuid.uuid4()))
    await control.send(key)
    await control.all_told(key)
    async with control.store.changing(key) as changing:
        assert changing is not None
        changing.tell(facts.input_queued(str(uuid.uuid4()), TEXT, NOW))
    handed_over = changing.told
    await control.tell(key, facts.input_removed(str(uuid.uuid4()), "user", NOW))
    control.outbox.told(key, handed_over)
    await control.outbox.told(key)
    assert [event.type for event in await control.events(key)][-2:] == ["input.queued", "input.removed"]


async def test_facts_that_are_handed_over_need_not_be_read(control: Control) -> None:
    key = new_key()
    await control.send(key)
    await control.all_told(key)
    await control.inputs.send(NewInput(key, "second", b"2", TEXT, None, None, OnBusy.QUEUE, "", 0.0))
    (_, handed) = control.changes[-1]
    assert await control.waiting(key) == ["input.queued"]
    # Gone from the table, as if it could not be read now.
    await control.store.acknowledge(key, [fact.number for fact in handed], 0)
    await control.outbox.told(key, handed)
    assert (await control.events(key))[-1].type == "input.queued"


async def test_what_is_admitted_here_is_picked_up_in_the_same_commit(control: Control) -> None:
    key, other = new_key(), str(uuid.uuid4())
    control.driver = str(uuid.uuid4())
    execution_id = await control.send(key)
    picked, _ = control.changes[-1]
    assert picked is not None
    assert (picked.execution.execution_id, picked.execution.driver) == (execution_id, control.driver)
    assert (picked.execution.tries, picked.content) == (1, sessions.Input(content=TEXT).SerializeToString())
    # It is this replica's, and looking again is no second try.
    assert await control.store.pick_up(key, other) is None
    again = await control.store.pick_up(key, control.driver)
    assert again == picked
    await control.store.give_back(picked.execution, control.driver)
    given = await control.execution(key, execution_id)
    assert (given.driver, given.tries) == (None, 0)


async def test_what_another_replica_holds_is_left_to_it(control: Control) -> None:
    key, other = new_key(), str(uuid.uuid4())
    control.driver = other
    execution_id = await control.send(key)
    await control.settlement.settle(key, execution_id, Winner("e", "execution.completed", 1, 1, ""))
    control.driver = str(uuid.uuid4())
    second = await control.send(key, "second")
    assert control.changes[-1][0] is None
    assert (await control.execution(key, second)).driver is None
    # And when nobody here drives any more, nothing is picked up.
    control.driver = None
    third = await control.send(new_key())
    assert control.changes[-1][0] is None
    assert third
