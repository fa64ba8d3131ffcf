"""What agents ask people: asked, answered, passed on once, closed.

Each of these is one transaction that locks the session row and tells readers what it did. An answer is stored where it
was given; it is passed on by whoever drives the agent that waits, or by the one continuation of an execution that was
paused meanwhile. Passed on is committed before the agent is told, so that nobody tells it twice.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta

from hearth.types.v1 import event_pb2
from services.chassis import crashpoints, telemetry
from services.chassis.clock import Clock, derived_id
from services.chassis.errors import Aborted, HearthError, InvalidArgument, NotFound
from services.pool.changing import Changing
from services.pool.control import admission, facts, gates
from services.pool.control.answers import check_answers
from services.pool.control.closing import follow
from services.pool.control.inputs import existing
from services.pool.control.starts import Starts
from services.pool.gate_rows import AnswerRow, GateRow
from services.pool.rows import (
    Execution,
    ExecutionState,
    Gate,
    GateKind,
    GateState,
    Key,
)
from services.pool.store import Changed, Store

logger = logging.getLogger(__name__)
crashpoint = crashpoints.declare(
    "pool", "ask.committed", "answer.committed", "gate.consumed", "gate.carried", "expire.committed"
)

_EXPIRE_BATCH = 100
# The request becomes an event, which may have 1 MiB with everything around it.
MAX_REQUEST_BYTES = 1024 * 1024 - 4096


@dataclasses.dataclass(frozen=True, slots=True)
class NewGate:
    """What an agent asks. `tool_call_id` is that of the log, `request_key` the agent's own id of the request."""

    tool_call_id: str
    request_key: str
    kind: GateKind
    tool_name: str
    input_json: str
    prompt: str = ""
    schema_json: str = ""
    options: Sequence[event_pb2.InteractionOption] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class NewAnswers:
    """A checked AnswerInteractions. `fingerprint` is that of the request without its id."""

    key: Key
    request_id: str
    fingerprint: bytes
    answers: Sequence[AnswerRow]
    answered_by: str
    traceparent: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Answered:
    """The gates of an AnswerInteractions as they stand, in the order of its answers; how many more of their executions
    wait; and the execution that goes on with them, None while that depends on the others."""

    gates: Sequence[Gate]
    still_open: int
    execution: Execution | None


def interaction_id(execution_id: str, tool_call_id: str, request_key: str) -> str:
    """The id of what an agent asks: asking the same again is the same interaction."""
    return derived_id("interaction", execution_id, tool_call_id, request_key)


class Interactions:
    """The shell; `changed` hears of each commit. Gates expire after `expiry` seconds of the database's clock."""

    def __init__(self, store: Store, starts: Starts, clock: Clock, *, expiry: float, changed: Changed) -> None:
        self._store = store
        self._starts = starts
        self._clock = clock
        self._expiry = timedelta(seconds=expiry)
        self._changed = changed

    # For the turn that drives an execution

    async def ask(self, execution: Execution, holder: str, asked: Sequence[NewGate]) -> list[Gate] | None:
        """Store what an agent asks, at once; the gates as they stand, in the order given. The execution is WAITING.

        Repeating it gives the same gates. None when `holder` does not drive the execution at that epoch any more, or it
        is STOPPING: then nobody is asked. Raises `InvalidArgument` TOO_LARGE for what no event can hold, and `Aborted`
        when the same request comes again with other arguments.
        """
        if not asked:
            return []
        key, execution_id = execution.key, execution.execution_id
        async with self._store.changing(key) as changing:
            moment = await changing.gates.wait(execution, holder) if changing is not None else None
            if changing is None or moment is None:
                return None
            expires_at = moment + self._expiry
            rows = [_row(execution_id, one, expires_at) for one in asked]
            new = await changing.gates.insert(execution_id, rows, expires_at)
            changing.tell(*(facts.interaction_requested(gate, self._clock.now()) for gate in new))
            found = _by_id(await changing.gates.named(row.interaction_id for row in rows))
            for row in rows:
                if found[row.interaction_id].input_digest != row.input_digest:
                    raise Aborted("a request came again with other arguments", reason="CONFLICT")
        crashpoint("ask.committed")
        self._changed(key, facts=changing.told)
        logger.info(
            "agent asks",
            extra={
                "session": str(key),
                "execution": execution_id,
                "interactions": [gate.interaction_id for gate in new],
            },
        )
        return [found[row.interaction_id] for row in rows]

    async def take(self, execution: Execution, holder: str, *, told: Collection[str] = ()) -> list[Gate] | None:
        """What the agent is to be told now: gates of its execution that are CONSUMED, or CLOSED, except for those in
        `told`, of which the caller knows that it has told it.

        The ANSWERED ones become CONSUMED by this, and the execution RUNNING when none waits for an answer any more. The
        caller tells the agent afterwards, never before; repeating the call after an error is safe. None when `holder`
        does not drive the execution at that epoch any more, or it is STOPPING: then nothing is told.
        """
        key, execution_id = execution.key, execution.execution_id
        async with self._store.changing(key) as changing:
            row = await changing.execution(execution_id) if changing is not None else None
            if changing is None or row is None or not _drives(row, execution, holder):
                return None
            found = await changing.gates.of(execution_id)
            answered = [gate.interaction_id for gate in found if gate.state is GateState.ANSWERED]
            consumed = await changing.gates.consume(execution_id, answered) if answered else []
            self._tell_consumed(changing, consumed)
            if row.state is ExecutionState.WAITING:
                await changing.gates.go_on(execution_id)
        if consumed:
            crashpoint("gate.consumed")
            self._changed(key, facts=changing.told)
        now = {**_by_id(found), **_by_id(consumed)}
        return [gate for gate in now.values() if gate.interaction_id not in told and _is_to_be_told(gate, execution_id)]

    async def begin(
        self, execution: Execution, holder: str, agent: str, harness_session_id: str, carried: Sequence[Gate]
    ) -> list[Gate] | None:
        """Move an execution to RUNNING, as `Store.run` does, and pass on what it carries (`PickedUp.continued`).

        Those of `carried` that were ANSWERED and are now CONSUMED by it, as they stand: only these may be told as
        decided, in the prompt that follows. Repeating it gives the same. None when the execution is not this holder's
        any more, or something else ends it: then nothing was passed on.
        """
        key, execution_id = execution.key, execution.execution_id
        async with self._store.changing(key) as changing:
            if changing is None or not await changing.gates.run_picked(execution, holder, agent, harness_session_id):
                return None
            consumed = await changing.gates.consume(execution_id, [gate.interaction_id for gate in carried])
            self._tell_consumed(changing, consumed)
            found = await changing.gates.named(gate.interaction_id for gate in carried)
        if consumed:
            crashpoint("gate.carried")
            self._changed(key, facts=changing.told)
        return [gate for gate in found if gate.state is GateState.CONSUMED and gate.consumed_by == execution_id]

    def _tell_consumed(self, changing: Changing, consumed: Sequence[Gate]) -> None:
        changing.tell(
            *(facts.interaction_resolved(gate, gate.answered_by or "", self._clock.now()) for gate in consumed)
        )

    # For people

    async def answer(self, new: NewAnswers) -> Answered:
        """Accept answers, all or none, or say how those stand that were accepted under this request id before.

        Raises `NotFound` INTERACTION_NOT_FOUND, `FailedPrecondition` INTERACTION_CLOSED for what was answered or closed
        before, and `InvalidArgument` for an answer that does not fit what was asked.
        """
        await self._check(new)
        async with self._store.changing(new.key) as found:
            changing = existing(found, new.key)
            view = await changing.view(new.request_id)
            known = admission.repeated(changing.session, view, "AnswerInteractions", new.fingerprint)
            if isinstance(known, admission.Refuse):
                raise known.error
            if known is None:
                await self._accept(changing, new)
                if view.active is not None:
                    telemetry.link(view.active.traceparent)
            answered = await self._answered(changing, new, view.active)
        if known is None:
            crashpoint("answer.committed")
            self._changed(new.key, facts=changing.told)
        return answered

    async def _check(self, new: NewAnswers) -> None:
        """Refuse what does not fit; what was asked never changes, so it is read without a lock. Which gates are still
        open is seen under it."""
        asked = _by_id(await self._store.named_gates(new.key, [answer.interaction_id for answer in new.answers]))
        check_answers(new.answers, asked)

    async def _accept(self, changing: Changing, new: NewAnswers) -> None:
        wanted = [answer.interaction_id for answer in new.answers]
        before = _by_id(await changing.gates.named(wanted))
        for one in wanted:
            gate = before.get(one)
            if gate is None:
                raise _not_found(one)
            if gate.state is not GateState.PENDING:
                raise gates.closed(gate)
        accepted = await changing.gates.answer(new.answers, new.answered_by)
        late = set(wanted) - {gate.interaction_id for gate in accepted}
        if late:
            raise gates.closed(before[min(late)], expired=True)
        await changing.insert_request(new.request_id, "AnswerInteractions", new.fingerprint)
        changing.tell(*(facts.interaction_answered(gate, self._clock.now()) for gate in accepted))
        for execution_id in dict.fromkeys(gate.execution_id for gate in accepted):
            await follow(changing, self._starts, execution_id, traceparent=new.traceparent)

    async def _answered(self, changing: Changing, new: NewAnswers, active: Execution | None) -> Answered:
        found = _by_id(await changing.gates.named(answer.interaction_id for answer in new.answers))
        asking = dict.fromkeys(gate.execution_id for gate in found.values())
        still_open = 0
        for execution_id in asking:
            still_open += (await changing.gates.counts(execution_id))[0]
        execution = active if active is not None and active.execution_id in asking else None
        for execution_id in asking:
            execution = execution or await changing.gates.continuation(execution_id)
        # Long after, it is the one that had them.
        for consumer in {gate.consumed_by for gate in found.values() if gate.consumed_by is not None}:
            execution = execution or await changing.execution(consumer)
        ordered = [found[answer.interaction_id] for answer in new.answers if answer.interaction_id in found]
        return Answered(ordered, still_open, execution)

    # For the sweep

    async def expire(self) -> None:
        """Close the gates whose time is over, a bounded number of them."""
        for key in await self._store.expired_gates(_EXPIRE_BATCH):
            async with self._store.changing(key) as changing:
                if changing is None:
                    continue
                closed = await changing.gates.expire()
                changing.tell(*(facts.interaction_resolved(gate, "expiry", self._clock.now()) for gate in closed))
                for execution_id in dict.fromkeys(gate.execution_id for gate in closed):
                    await follow(changing, self._starts, execution_id)
            if not closed:
                continue
            crashpoint("expire.committed")
            logger.info("interactions expired", extra={"session": str(key), "count": len(closed)})
            self._changed(key, facts=changing.told)


def _drives(row: Execution, mine: Execution, holder: str) -> bool:
    at_work = row.state in {ExecutionState.WAITING, ExecutionState.RUNNING}
    return at_work and (row.epoch, row.driver, row.ending_event_id) == (mine.epoch, holder, None)


def _is_to_be_told(gate: Gate, execution_id: str) -> bool:
    if gate.state is GateState.CONSUMED:
        return gate.consumed_by == execution_id
    return gate.state is GateState.CLOSED


def _row(execution_id: str, asked: NewGate, expires_at: datetime) -> GateRow:
    digest = gates.input_digest(asked.input_json)
    request = event_pb2.InteractionRequested(
        interaction_id=interaction_id(execution_id, asked.tool_call_id, asked.request_key),
        kind=event_pb2.InteractionKind.Value(f"INTERACTION_KIND_{asked.kind}"),
        tool_call_id=asked.tool_call_id,
        tool_name=asked.tool_name,
        input_json=asked.input_json,
        input_digest=digest.hex(),
        prompt=asked.prompt,
        answer_schema_json=asked.schema_json,
        options=asked.options,
        expires_at=facts.timestamp(expires_at),
    )
    if request.ByteSize() > MAX_REQUEST_BYTES:
        raise InvalidArgument("what the agent asks is larger than an event may be", reason="TOO_LARGE")
    return GateRow(
        request.interaction_id,
        asked.tool_call_id,
        asked.request_key,
        asked.kind,
        request.SerializeToString(deterministic=True),
        digest,
    )


def _by_id(found: Sequence[Gate]) -> Mapping[str, Gate]:
    return {gate.interaction_id: gate for gate in found}


def _not_found(missing: str) -> HearthError:
    return NotFound(
        "no such interaction in this session",
        reason="INTERACTION_NOT_FOUND",
        resource=("interaction", missing, ""),
    )
