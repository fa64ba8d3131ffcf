"""Commands and the queue as rows of a real database: each transition is taken once, by whoever is first, and what is
left over is settled, given up or deleted in time. Two stores stand for two replicas."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Sequence

import asyncpg
import grpc.aio
import pytest_asyncio

from hearth.secret import Secret
from hearth.types.v1 import content_pb2
from services.chassis.clock import SystemClock, SystemIds
from services.chassis.migrations import migrate
from services.chassis.postgres import Pool, create_pool
from services.pool.control.admission import OnBusy
from services.pool.control.commands import CLAIM_LEASE, MAX_ATTEMPTS, Aim, Commands
from services.pool.control.executions import Winner
from services.pool.control.inputs import Inputs, NewInput
from services.pool.control.interactions import Interactions, NewGate
from services.pool.control.settlement import Settled, Settlement
from services.pool.control.starts import Starts
from services.pool.control.upkeep import Upkeep
from services.pool.log import Log
from services.pool.rows import (
    Command,
    CommandKind,
    CommandOutcome,
    CommandState,
    Execution,
    ExecutionState,
    GateKind,
    GateState,
    InputState,
    Key,
    OutboxRow,
    Resolution,
)
from services.pool.settings import PoolSettings
from services.pool.store import PLANNER, SCHEMA, PickedUp, Store
from services.pool.upkeep_rows import UpkeepRows
from tests.unit.pool.clocks import ManualClock

TEXT = [content_pb2.ContentPart(text=content_pb2.TextPart(text="hello"))]
HERE, THERE = str(uuid.uuid4()), str(uuid.uuid4())


class Desk:
    """The part of a pool that stands on rows alone, and the rows as they lie there."""

    def __init__(self, pool: Pool, nowhere: grpc.aio.Channel) -> None:
        clock, ids = SystemClock(), SystemIds()
        self.pool, self.store, self.rows = pool, Store(pool), UpkeepRows(pool)
        starts = Starts(clock, ids, "scripted")
        self.settlement = Settlement(self.store, starts, Log(nowhere), clock, changed=_nobody)
        self.interactions = Interactions(self.store, starts, clock, expiry=600.0, changed=_nobody)
        self.commands = Commands(self.store, clock, ids, changed=_nobody)
        self.inputs = Inputs(
            self.store,
            starts,
            clock,
            ids,
            queue_cap=10,
            changed=_nobody,
            settle_ended=self.settlement.settle_ended,
        )

    async def send(self, key: Key, on_busy: OnBusy = OnBusy.QUEUE, request_id: str = "") -> str:
        """Send a message; the id of its input."""
        return (
            await self.inputs.send(
                NewInput(key, request_id or str(uuid.uuid4()), b"fp", TEXT, None, None, on_busy, "", 0.0)
            )
        ).input_id

    async def running(self, key: Key, *, driver: str = HERE) -> Execution:
        """A session whose agent works for `driver`."""
        await self.send(key)
        picked = await self.store.pick_up(key, driver)
        assert picked is not None
        assert await self.store.run(picked.execution, driver, "scripted", "session")
        return picked.execution

    async def stop(self, key: Key, execution_id: str) -> Command:
        """Ask for a plain Stop."""
        return await self.commands.stop(key, str(uuid.uuid4()), b"fp", Aim(execution_id))

    async def end(self, key: Key, execution: Execution, kind: str) -> Settled:
        """Settle an execution by an ending, as after history has taken it."""
        winner = Winner(str(uuid.uuid4()), f"execution.{kind}", execution.epoch, 0, "CODE" if kind == "failed" else "")
        settled = await self.settlement.settle(key, execution.execution_id, winner)
        assert settled is not None
        return settled

    async def command(self, key: Key, command_id: str) -> Command:
        """A command as it is."""
        found = await self.store.command(key, command_id)
        assert found is not None
        return found

    async def queue(self, key: Key) -> list[str]:
        """What waits, by rank."""
        return [waiting.input_id for waiting in await self.store.queue(key, offset=0, limit=100)]

    async def claim(self, execution: Execution, holder: str = HERE) -> Command | None:
        """Take the cancel of an execution for delivery."""
        return await self.store.claim_cancel(execution.execution_id, holder, CLAIM_LEASE, attempts=MAX_ATTEMPTS)

    async def return_commands(self) -> list[Key]:
        """Put back what took too long."""
        return await self.rows.return_commands(attempts=MAX_ATTEMPTS, limit=100)

    async def run_out(self, command: Command) -> None:
        """Let the time of a delivery be over."""
        await self.set(
            "UPDATE pool.command SET claim_expires_at = now() - interval '1 s' WHERE command_id = $1",
            command.command_id,
        )

    async def set(self, statement: str, *arguments: object) -> None:
        """Change rows as time, or another version, would."""
        await self.pool.execute(statement, *arguments)

    async def value(self, statement: str, *arguments: object) -> object:
        """What a row says."""
        return await self.pool.fetchval(statement, *arguments)


def _nobody(
    key: Key,
    *,
    admitted_at: float | None = None,
    picked: PickedUp | None = None,
    facts: Sequence[OutboxRow] = (),
) -> None:
    """Nobody drives anything here."""


@pytest_asyncio.fixture
async def desk(module_postgres_dsn: str) -> AsyncIterator[Desk]:
    """One on the module's database, which tests share, each with sessions of its own."""
    await migrate(Secret(module_postgres_dsn), SCHEMA, "services.pool")
    settings = PoolSettings(postgres_dsn=Secret(module_postgres_dsn))
    async with (
        await create_pool(settings, "pool", server_settings=PLANNER) as pool,
        grpc.aio.insecure_channel("127.0.0.1:1") as nowhere,
    ):
        yield Desk(pool, nowhere)


def new_key() -> Key:
    """A session that nothing was said in."""
    return Key("acme", f"s-{uuid.uuid4().hex[:12]}")


async def test_n14_n16_two_replicas_claim_a_command_and_one_gets_it(desk: Desk) -> None:
    key = new_key()
    execution = await desk.running(key)
    command = await desk.stop(key, execution.execution_id)
    claims = await asyncio.gather(*(desk.claim(execution) for _ in range(4)))
    (mine,) = [claim for claim in claims if claim is not None]
    assert (mine.command_id, mine.state, mine.claimed_by) == (command.command_id, CommandState.CLAIMED, HERE)
    assert mine.attempts == 1
    left = await desk.value(
        "SELECT extract(epoch FROM claim_expires_at - now())::float FROM pool.command WHERE command_id = $1",
        command.command_id,
    )
    assert isinstance(left, float)
    assert 0 < left <= CLAIM_LEASE
    assert await desk.claim(execution) is None


async def test_n15_n17_who_does_not_drive_it_gets_no_command_and_changes_none(desk: Desk) -> None:
    key = new_key()
    execution = await desk.running(key)
    command = await desk.stop(key, execution.execution_id)
    assert await desk.claim(execution, THERE) is None
    assert await desk.claim(execution) is not None
    assert await desk.claim(execution, THERE) is None
    found = await desk.command(key, command.command_id)
    assert (found.state, found.claimed_by) == (CommandState.CLAIMED, HERE)


async def test_n22_n23_a_claim_that_ran_out_is_put_back_and_no_other(desk: Desk) -> None:
    key, other = new_key(), new_key()
    execution, kept = await desk.running(key), await desk.running(other)
    command = await desk.stop(key, execution.execution_id)
    held = await desk.stop(other, kept.execution_id)
    assert await desk.claim(execution) is not None
    assert await desk.claim(kept) is not None
    await desk.run_out(command)
    assert key in await desk.return_commands()
    found = await desk.command(key, command.command_id)
    assert (found.state, found.claimed_by, found.attempts) == (CommandState.PENDING, None, 1)
    assert (await desk.command(other, held.command_id)).state is CommandState.CLAIMED
    again = await desk.claim(execution)
    assert again is not None
    assert (again.command_id, again.attempts) == (command.command_id, 2)


async def test_n24_deliveries_are_counted_in_the_database_and_end_at_the_most(desk: Desk) -> None:
    key = new_key()
    execution = await desk.running(key)
    command = await desk.stop(key, execution.execution_id)
    for attempt in range(1, MAX_ATTEMPTS + 1):
        claimed = await desk.claim(execution)
        assert claimed is not None
        assert claimed.attempts == attempt
        await desk.run_out(command)
        await desk.return_commands()
    assert await desk.claim(execution) is None
    found = await desk.command(key, command.command_id)
    assert (found.state, found.attempts) == (CommandState.CLAIMED, MAX_ATTEMPTS)


async def test_n18_n28_what_is_settled_stays_as_it_was_settled_first(desk: Desk) -> None:
    key = new_key()
    execution = await desk.running(key)
    command = await desk.stop(key, execution.execution_id)
    first = await desk.end(key, execution, "stopped")
    second = await desk.end(key, execution, "completed")
    assert (first.first, second.first, second.outcome) == (True, False, first.outcome)
    async with desk.store.changing(key) as changing:
        assert changing is not None
        assert not await changing.settle_command(command.command_id, CommandState.OBSOLETE, CommandOutcome.LOST)
    found = await desk.command(key, command.command_id)
    assert (found.state, found.outcome) == (CommandState.APPLIED, CommandOutcome.STOPPED)


async def test_n19_n27_an_ending_settles_a_command_that_nobody_took(desk: Desk) -> None:
    for kind, state, outcome in (
        ("completed", CommandState.OBSOLETE, CommandOutcome.NOT_RUNNING),
        ("failed", CommandState.OBSOLETE, CommandOutcome.NOT_RUNNING),
        ("stopped", CommandState.APPLIED, CommandOutcome.STOPPED),
        ("lost", CommandState.OBSOLETE, CommandOutcome.LOST),
    ):
        key = new_key()
        execution = await desk.running(key)
        command = await desk.stop(key, execution.execution_id)
        await desk.end(key, execution, kind)
        found = await desk.command(key, command.command_id)
        assert (found.state, found.outcome) == (state, outcome), kind
        # Who comes with a claim after that does not open it again.
        assert await desk.claim(execution) is None
        assert await desk.command(key, command.command_id) == found


async def test_n21_n31_n45_n91_what_is_late_of_an_older_execution_leaves_a_newer_one_alone(desk: Desk) -> None:
    key = new_key()
    older = await desk.running(key)
    await desk.end(key, older, "completed")
    newer = await desk.running(key)
    command = await desk.stop(key, newer.execution_id)
    await desk.end(key, older, "stopped")
    await desk.commands.settle_late(key)
    found = await desk.store.execution(key, newer.execution_id)
    assert found is not None
    assert (found.state, found.driver) == (ExecutionState.STOPPING, HERE)
    assert (await desk.command(key, command.command_id)).state is CommandState.PENDING


async def test_n37_n50_two_endings_settled_at_once_are_one_and_both_learn_which(desk: Desk) -> None:
    for _ in range(4):
        key = new_key()
        execution = await desk.running(key)
        settled = await asyncio.gather(*(desk.end(key, execution, kind) for kind in ("completed", "lost", "stopped")))
        assert sum(one.first for one in settled) == 1
        found = await desk.store.execution(key, execution.execution_id)
        assert found is not None
        assert {one.outcome for one in settled} == {found.outcome}
        again = await desk.end(key, execution, "failed")
        assert (again.first, again.outcome) == (False, found.outcome)


async def test_n30_a_stop_that_has_nothing_to_stop_changes_nothing_else(desk: Desk) -> None:
    key = new_key()
    execution = await desk.running(key)
    await desk.end(key, execution, "completed")
    before = await desk.store.session(key)
    command = await desk.stop(key, execution.execution_id)
    assert (command.state, command.outcome) == (CommandState.OBSOLETE, CommandOutcome.NOT_RUNNING)
    assert await desk.store.session(key) == before
    assert await desk.store.active_execution(key) is None


async def test_n33_all_that_an_ending_means_is_one_commit(desk: Desk) -> None:
    key = new_key()
    execution = await desk.running(key)
    steered = await desk.send(key, OnBusy.STEER)
    await desk.end(key, execution, "stopped")
    transactions = await desk.pool.fetch(
        """SELECT xmin::text FROM pool.execution WHERE project = $1 AND session = $2
           UNION SELECT xmin::text FROM pool.command WHERE project = $1 AND session = $2
           UNION SELECT xmin::text FROM pool.input WHERE input_id = $3
           UNION SELECT xmin::text FROM pool.session WHERE project = $1 AND session = $2""",
        *key,
        steered,
    )
    assert len(transactions) == 1
    active = await desk.store.active_execution(key)
    assert active is not None
    assert active.input_id == steered


async def test_n34_a_kind_of_command_that_only_a_newer_version_knows_is_shown_settled_and_never_claimed(
    desk: Desk,
) -> None:
    key = new_key()
    execution = await desk.running(key)
    command_id = str(uuid.uuid4())
    await desk.set(
        "INSERT INTO pool.command (command_id, project, session, kind, execution_id, state)"
        " VALUES ($1, $2, $3, 'PRUNE', $4, 'PENDING')",
        command_id,
        *key,
        execution.execution_id,
    )
    assert (await desk.command(key, command_id)).kind is CommandKind.UNKNOWN
    assert await desk.claim(execution) is None
    # It is no cancel: a Stop is a command of its own beside it.
    command = await desk.stop(key, execution.execution_id)
    claimed = await desk.claim(execution)
    assert claimed is not None
    assert claimed.command_id == command.command_id
    await desk.end(key, execution, "stopped")
    found = await desk.command(key, command_id)
    assert (found.state, found.outcome) == (CommandState.OBSOLETE, CommandOutcome.NOT_RUNNING)


async def test_n26_a_command_that_nobody_is_there_to_deliver_is_given_up(desk: Desk) -> None:
    """By whoever looks, on its own clock; not while its execution is driven, and not for a gap in its own looks."""
    key, driven = new_key(), new_key()
    execution, healthy = await desk.running(key, driver=THERE), await desk.running(driven)
    await desk.set("INSERT INTO pool.replica (holder, address) VALUES ($1, 'here:1') ON CONFLICT DO NOTHING", HERE)
    steered = await desk.send(key, OnBusy.STEER)
    kept = await desk.stop(driven, healthy.execution_id)
    (command,) = [row for row in await _commands(desk, key) if row.steer_input_id == steered]
    clock = ManualClock()
    upkeep = Upkeep(desk.rows, desk.commands, clock, retention=0.0)

    async def look_for(seconds: float) -> CommandState:
        for _ in range(int(seconds / 5)):
            await upkeep.look()
            await clock.advance(5.0)
        return (await desk.command(key, command.command_id)).state

    assert await look_for(85) is CommandState.PENDING
    await clock.advance(60.0)
    assert await look_for(90) is CommandState.PENDING
    assert await look_for(10) is CommandState.OBSOLETE
    assert (await desk.command(key, command.command_id)).outcome is CommandOutcome.LOST
    assert (await desk.command(driven, kept.command_id)).state is CommandState.PENDING
    # What waited for it waits in the queue, first, and may be taken out.
    assert await desk.queue(key) == [steered]
    removed = await desk.inputs.remove(key, "remove", b"fp", steered)
    assert removed.state is InputState.REMOVED
    # The run itself has not ended by that: a new Stop is a new command.
    again = await desk.stop(key, execution.execution_id)
    assert again.command_id != command.command_id


async def _commands(desk: Desk, key: Key) -> list[Command]:
    async with desk.store.changing(key) as changing:
        assert changing is not None
        return await changing.open_commands()


async def test_n32_n05_commands_that_outlived_their_execution_are_settled_by_its_ending(desk: Desk) -> None:
    for kind, busy, outcome in (
        ("stopped", True, CommandOutcome.STOPPED),
        ("lost", True, CommandOutcome.LOST),
        ("completed", False, CommandOutcome.NOT_RUNNING),
        ("completed", True, CommandOutcome.SUPERSEDED),
    ):
        key = new_key()
        execution = await desk.running(key)
        await desk.end(key, execution, kind)
        newer = await desk.running(key) if busy else None
        command_id = str(uuid.uuid4())
        await desk.set(
            "INSERT INTO pool.command (command_id, project, session, kind, execution_id, state)"
            " VALUES ($1, $2, $3, 'CANCEL', $4, 'PENDING')",
            command_id,
            *key,
            execution.execution_id,
        )
        await Upkeep(desk.rows, desk.commands, ManualClock(), retention=0.0).look()
        assert (await desk.command(key, command_id)).outcome is outcome
        if newer is not None:
            found = await desk.store.execution(key, newer.execution_id)
            assert found is not None
            assert found.state is ExecutionState.RUNNING


async def test_settled_rows_are_deleted_when_their_time_is_over_and_nothing_else_is(desk: Desk) -> None:
    """In batches, and never what is still to be run, delivered or told, nor the newest execution of a session."""
    key, age = new_key(), 7 * 86_400.0
    oldest = await desk.running(key)
    await desk.end(key, oldest, "completed")
    first = await desk.running(key)
    await desk.stop(key, first.execution_id)
    gone = await desk.send(key)
    waiting = await desk.send(key, request_id="waiting")
    await desk.inputs.remove(key, "remove", b"fp", gone)
    await desk.end(key, first, "stopped")
    newest = (await desk.inputs.send(NewInput(key, "newest", b"fp", TEXT, None, None, OnBusy.QUEUE, "", 0.0))).execution
    assert newest is not None
    await desk.set("DELETE FROM pool.outbox WHERE project = $1 AND session = $2", *key)

    async def rows() -> dict[str, int]:
        return {
            table: await desk.pool.fetchval(
                f"SELECT count(*) FROM pool.{table} WHERE project = $1 AND session = $2", *key
            )
            for table in ("request", "command", "input", "execution")
        }

    upkeep = Upkeep(desk.rows, desk.commands, ManualClock(), retention=age)
    before = await rows()
    await upkeep.retire()
    assert await rows() == before
    for table, columns in (
        ("request", ("created_at",)),
        ("command", ("created_at", "settled_at")),
        ("input", ("created_at", "promoted_at")),
        ("execution", ("created_at", "settled_at")),
    ):
        moved = ", ".join(f"{column} = {column} - interval '8 days'" for column in columns)
        await desk.set(f"UPDATE pool.{table} SET {moved} WHERE project = $1 AND session = $2", *key)
    # A session that is being changed is left for another time.
    async with desk.store.changing(key):
        await upkeep.retire()
    assert await rows() == before
    await upkeep.retire()
    # What waits and what runs, each with the request that made it; and what ended last, on which the next turn builds.
    assert await rows() == {"request": 2, "command": 0, "input": 2, "execution": 2}
    assert await desk.store.execution(key, oldest.execution_id) is None
    assert await desk.queue(key) == [waiting]
    active = await desk.store.active_execution(key)
    assert active is not None
    assert active.execution_id == newest.execution_id
    assert (await desk.inputs.send(NewInput(key, "waiting", b"fp", TEXT, None, None, OnBusy.QUEUE, "", 0.0))).rank == 1


async def test_a_backlog_of_settled_rows_goes_in_batches(desk: Desk) -> None:
    key = new_key()
    await desk.running(key)
    await desk.set(
        "INSERT INTO pool.request (project, session, request_id, method, fingerprint, created_at)"
        " SELECT $1, $2, 'old-' || n, 'ResumeQueue', '', now() - interval '9 days' FROM generate_series(1, 25) n",
        *key,
    )
    assert await desk.rows.retire("requests", 86_400.0, 10) == 10
    assert await desk.rows.retire("requests", 86_400.0, 10) == 10
    assert await desk.rows.retire("requests", 86_400.0, 10) == 5


async def test_n46_what_has_to_stay_does_not_hide_what_can_go(desk: Desk) -> None:
    key = new_key()
    await desk.running(key)
    for number in range(8):
        await desk.send(key, request_id=f"waits-{number}")
    await desk.set(
        "INSERT INTO pool.request (project, session, request_id, method, fingerprint)"
        " SELECT $1, $2, 'done-' || n, 'ResumeQueue', '' FROM generate_series(1, 3) n",
        *key,
    )
    await desk.set(
        "UPDATE pool.request SET created_at = created_at - interval '9 days' WHERE project = $1 AND session = $2", *key
    )
    assert await desk.rows.retire("requests", 86_400.0, 4) == 3
    # What waits, and what runs.
    left = "SELECT count(*) FROM pool.request WHERE project = $1 AND session = $2"
    assert await desk.value(left, *key) == 9


async def test_n112_an_ending_that_is_settled_twice_promotes_one_input(desk: Desk) -> None:
    key = new_key()
    execution = await desk.running(key)
    first, second = await desk.send(key), await desk.send(key)
    settled = await asyncio.gather(*(desk.end(key, execution, "completed") for _ in range(3)))
    promoted = [one.promoted for one in settled if one.promoted is not None]
    assert [one.input_id for one in promoted] == [first]
    assert await desk.queue(key) == [second]


async def test_n116_n117_whichever_ending_wins_decides_what_becomes_of_a_steer(desk: Desk) -> None:
    """The bound input runs next where the way was made free, also by the turn itself; else it waits first."""
    for kind, runs in (("stopped", True), ("completed", True), ("failed", True), ("paused", True), ("lost", False)):
        key = new_key()
        execution = await desk.running(key)
        other = await desk.send(key)
        steered = await desk.send(key, OnBusy.STEER)
        assert await desk.queue(key) == [steered, other]
        settled = await desk.end(key, execution, kind)
        session = await desk.store.session(key)
        assert session is not None
        assert session.queue_paused is not runs, kind
        if runs:
            assert settled.promoted is not None
            assert (settled.promoted.input_id, await desk.queue(key)) == (steered, [other])
        else:
            assert settled.promoted is None
            assert await desk.queue(key) == [steered, other]
        found = next(iter(await desk.store.queue(key, offset=0, limit=1)))
        assert found.steer_command_id is None


async def test_n113_a_send_that_meets_the_end_of_a_turn_runs_or_waits_behind_what_the_end_has_started(
    desk: Desk,
) -> None:
    for number in range(6):
        key = new_key()
        execution = await desk.running(key)
        queued = [await desk.send(key)] if number % 2 else []
        settled, mine = await asyncio.gather(desk.end(key, execution, "completed"), desk.send(key))
        active = await desk.store.active_execution(key)
        assert active is not None
        order = [active.input_id, *await desk.queue(key)]
        assert order == [*queued, mine]
        assert settled.first


async def test_a_queue_that_is_resumed_before_the_stop_has_its_answer_goes_on_with_it(desk: Desk) -> None:
    for resumed in (True, False):
        key = new_key()
        execution = await desk.running(key)
        waiting = await desk.send(key)
        await desk.stop(key, execution.execution_id)
        if resumed:
            assert await desk.inputs.resume(key, "resume", b"fp") is None
        settled = await desk.end(key, execution, "stopped")
        assert (settled.promoted is not None) is resumed
        assert await desk.queue(key) == ([] if resumed else [waiting])


async def test_a_stop_pauses_the_queue_whichever_ending_wins(desk: Desk) -> None:
    for kind in ("stopped", "completed", "failed", "paused", "lost"):
        key = new_key()
        execution = await desk.running(key)
        waiting = await desk.send(key)
        await desk.stop(key, execution.execution_id)
        settled = await desk.end(key, execution, kind)
        session = await desk.store.session(key)
        assert session is not None
        assert (settled.promoted, session.queue_paused) == (None, True), kind
        assert await desk.queue(key) == [waiting]


async def test_n110_a_steer_closes_what_the_agent_asks_before_it_has_its_answer(desk: Desk) -> None:
    """From the commit of a Stop, or of a steer, on an answer is too late, and nobody is told otherwise."""
    for on_busy in (OnBusy.STEER, None):
        key = new_key()
        execution = await desk.running(key)
        asked = NewGate("call", "1", GateKind.APPROVAL, "search", "{}")
        (gate,) = await desk.interactions.ask(execution, HERE, [asked]) or []
        assert gate.state is GateState.PENDING
        if on_busy is not None:
            await desk.send(key, on_busy)
        else:
            await desk.stop(key, execution.execution_id)
        (gate,) = await desk.store.gates(execution.execution_id)
        assert (gate.state, gate.resolution) == (GateState.CLOSED, Resolution.CANCELLED)
        found = await desk.store.execution(key, execution.execution_id)
        assert found is not None
        assert found.state is ExecutionState.STOPPING
        assert await desk.interactions.take(execution, HERE) is None


async def test_one_open_cancel_whoever_asks(desk: Desk) -> None:
    """Also the database refuses a second one."""
    key = new_key()
    execution = await desk.running(key)
    commands = await asyncio.gather(*(desk.stop(key, execution.execution_id) for _ in range(5)))
    assert len({command.command_id for command in commands}) == 1
    try:
        await desk.set(
            "INSERT INTO pool.command (command_id, project, session, kind, execution_id, state)"
            " VALUES ($1, $2, $3, 'STEER', $4, 'PENDING')",
            str(uuid.uuid4()),
            *key,
            execution.execution_id,
        )
    except asyncpg.UniqueViolationError:
        return
    raise AssertionError("two cancels of one execution are open")
