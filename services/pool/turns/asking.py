"""What a turn does while its agent asks: policy answers, a decision that was made before does, or people are asked.

An agent may ask for several things at once, and goes on with each one when that is answered, whatever becomes of the
others. Its turn keeps it for a while; then the turn is paused, and the answers start another one. From the moment on at
which that is decided the agent hears of no answer any more: its entry is DRAINING.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import ExitStack
from typing import Any

from hearth.history.v1 import history_pb2
from hearth.session.v1 import session_pb2 as sessions
from hearth.types.v1 import event_pb2
from services.chassis import crashpoints
from services.chassis.clock import derived_id
from services.chassis.errors import Aborted, InvalidArgument
from services.pool.control import facts, gates
from services.pool.control.gates import Policy
from services.pool.control.interactions import NewGate, interaction_id
from services.pool.harness.assembler import Output, TurnAssembler
from services.pool.harness.port import Answer, HarnessError, HarnessSession, PermissionAsked, QuestionAsked
from services.pool.rows import Decision, Execution, Gate, GateKind, GateState
from services.pool.turns.continuing import Call, Decided
from services.pool.turns.limits import LimitWatch
from services.pool.turns.pausing import Pause, Standing, Why, pause_at
from services.pool.turns.persistence import until_it_lands
from services.pool.turns.room import TurnRoom
from services.pool.turns.signals import Signals, end, first_of
from services.pool.warm.entries import Entry, EntryState

logger = logging.getLogger(__name__)
crashpoint = crashpoints.declare("pool", "answer.telling", "answer.told", "pause.draining")

# Of the arguments that a person is to decide about: the question must fit into an event.
_INPUT_BYTES = 768 * 1024


@dataclasses.dataclass(frozen=True, slots=True)
class _Request:
    asked: PermissionAsked | QuestionAsked
    gate: NewGate


class Asking:
    """The requests of one prompt. `write` takes output of the turn, `look` reads its row soon; `limits` stand still
    while people are asked; `decided` holds what people said before about calls that an earlier turn asked for."""

    def __init__(
        self,
        room: TurnRoom,
        execution: Execution,
        spec: sessions.SessionSpec,
        *,
        entry: Entry,
        harness: HarnessSession,
        assembler: TurnAssembler,
        limits: LimitWatch,
        signals: Signals,
        decided: Decided,
        tool_call_limit: float,
        write: Callable[[Iterable[Output]], None],
        look: Callable[[], None],
    ) -> None:
        self._room = room
        self._execution = execution
        self._spec = spec
        self._entry = entry
        self._harness = harness
        self._assembler = assembler
        self._limits = limits
        self._signals = signals
        self._decided = decided
        self._tool_call_limit = tool_call_limit
        self._write = write
        self._look = look
        # By interaction id: all that wait, and those of them that are not committed yet.
        self._open: dict[str, _Request] = {}
        self._new: list[str] = []
        # Of those that were answered or closed: what the agent has heard of.
        self._told: set[str] = set()
        self._refused = False
        self._frozen = ExitStack()
        self._changed = asyncio.Event()
        now = room.clock.monotonic()
        self._heard_at = self._asked_at = now
        self._leaving_at: float | None = None
        self._has_place = True

    @property
    def waiting(self) -> bool:
        """Whether people are asked."""
        return bool(self._open) and not self._refused

    def wake(self) -> None:
        """The signals changed."""
        self._changed.set()

    def heard(self) -> None:
        """The agent sent something."""
        self._heard_at = self._room.clock.monotonic()
        if self._open:
            self._changed.set()

    async def requested(self, asked: PermissionAsked | QuestionAsked) -> None:
        """Take a request of the agent; returns when it is answered, or people are asked about it."""
        if self._signals.over:
            # After a Stop nothing new may start, whatever anybody says. A turn that is about to be paused leaves it
            # open: told that it was cancelled, an agent may end the turn, and with it what people are asked.
            if self._signals.stopping or not self.waiting:
                await self._decline(asked, Answer.CANCELLED)
            return
        if isinstance(asked, PermissionAsked):
            asked = self._assembler.about(asked)
            policy = self._policy(asked)
            if policy is not Policy.ASK:
                await self._apply_policy(asked, allowed=policy is Policy.ALLOW)
                return
        gate = self._gate(asked)
        before = self._decided.use(_call(gate))
        if before is not None:
            self._tell_of_decision(gate, before)
            await self._answer(asked, before)
            return
        if not self._open:
            self._frozen.enter_context(self._limits.frozen())
        name = self._id_of(gate)
        self._open[name] = _Request(asked, gate)
        self._new.append(name)
        self._changed.set()

    async def run(self) -> Pause:
        """Ask, and hand over what people answer, until the turn is to be paused.

        Raises `HarnessError` when an agent cannot be told; what was committed as handed over stays so.
        """
        while True:
            self._changed.clear()
            if self._new:
                await self._ask()
            if self._signals.answered and not self._signals.over:
                await self._hand_over()
            why, left = self._pause_in()
            if why is not None and left <= 0 and self._room.entries.drain(self._entry):
                crashpoint("pause.draining")
                logger.info(
                    "turn is paused",
                    extra={
                        "session": str(self._execution.key),
                        "execution": self._execution.execution_id,
                        "why": why.value,
                        "open": len(self._open),
                    },
                )
                return Pause(why, tuple(self._open))
            await self._wait(left if why is not None and left > 0 else None)

    def close(self) -> None:
        """The prompt is over, whatever it still waited for."""
        self._frozen.close()
        self._room.entries.go_on(self._entry)

    # Asking people

    async def _ask(self) -> None:
        """Commit what is to be asked: several requests that came together in one transaction."""
        asked, self._new = self._new, []
        entries = self._room.entries
        if self._entry.state is not EntryState.AWAITING:
            cap = self._room.settings.waiting_cap(self._entry.live.provider if self._entry.live is not None else "")
            self._has_place = entries.may_wait(self._entry, cap) and entries.ask(self._entry)
        try:
            stored = await self._store(asked)
        except (InvalidArgument, Aborted):
            # One of them cannot be asked; the others are no worse for it.
            for name in asked:
                stored = await self._store_alone(name)
                if stored is None:
                    break
        if stored is None:
            # The execution is being stopped, or somebody else's: the row says which, and that ends these requests too.
            self._refused = True
            self._look()
        self._asked_at = self._room.clock.monotonic()
        self._go_on_if_answered()

    async def _store(self, names: Sequence[str]) -> list[Gate] | None:
        requests = [self._open[name].gate for name in names]
        return await until_it_lands(
            self._room.clock,
            self._execution.key,
            "ask",
            lambda: self._room.interactions.ask(self._execution, self._room.holder, requests),
        )

    async def _store_alone(self, name: str) -> list[Gate] | None:
        try:
            return await self._store([name])
        except (InvalidArgument, Aborted) as error:
            logger.warning("nobody can be asked", extra={"session": str(self._execution.key), "reason": error.reason})
            await self._decline(self._open.pop(name).asked, Answer.DENY)
            return []

    async def _hand_over(self) -> None:
        """Give the agent what people decided, once it is committed that it is given."""
        self._signals.answers_taken()
        if not self.waiting:
            return
        taken = await until_it_lands(
            self._room.clock,
            self._execution.key,
            "take answers",
            lambda: self._room.interactions.take(self._execution, self._room.holder, told=self._told),
        )
        if taken is None:
            self._look()
            return
        if taken:
            # Readers see that it was passed on before what the agent makes of it.
            await until_it_lands(
                self._room.clock,
                self._execution.key,
                "tell of answers",
                lambda: self._room.outbox.told(self._execution.key),
            )
        for gate in taken:
            self._told.add(gate.interaction_id)
            request = self._open.pop(gate.interaction_id, None)
            if request is None or self._signals.stopping:
                # After a Stop nothing new may start; the cancel answers what is open.
                continue
            crashpoint("answer.telling")
            if not await self._room.trust.confirm(self._execution):
                # Somebody else has the session; what was committed as handed over is told to no agent.
                self._look()
                return
            if gate.state is GateState.CLOSED:
                # Nobody answered in time: what was not allowed does not run, and the agent goes on.
                await self._decline(request.asked, Answer.DENY)
            else:
                await self._answer(request.asked, gate)
            crashpoint("answer.told")
            self._asked_at = self._room.clock.monotonic()
        self._go_on_if_answered()

    def _go_on_if_answered(self) -> None:
        if not self._open:
            self._frozen.close()
            self._room.entries.go_on(self._entry)
            self._has_place = True

    # Pausing

    def _pause_in(self) -> tuple[Why | None, float]:
        """Why the turn is to be paused next, and in how many seconds that may be; None while nobody is asked."""
        ending = self._signals.stopping or self._signals.taken or self._signals.fenced or self._signals.gone
        if not self.waiting or self._new or ending:
            return None, 0.0
        now = self._room.clock.monotonic()
        if self._signals.leaving and self._leaving_at is None:
            self._leaving_at = now
        standing = Standing(
            self._asked_at,
            self._heard_at,
            self._leaving_at,
            self._signals.shut_down,
            self._has_place,
            working=bool(self._assembler.allowed_tools),
        )
        window = self._room.settings.approval_window
        why, at = pause_at(standing, window=window, tool_call_limit=self._tool_call_limit)
        return why, at - now

    async def _wait(self, seconds: float | None) -> None:
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._changed.wait())]
        if seconds is not None:
            waits.append(asyncio.ensure_future(self._room.clock.sleep(seconds)))
        try:
            await first_of(*waits)
        finally:
            await end(*waits)

    # Answers

    async def _answer(self, asked: PermissionAsked | QuestionAsked, gate: Gate) -> None:
        if isinstance(asked, PermissionAsked):
            allowed = gate.decision is Decision.ALLOWED
            self._assembler.decided(asked.tool_call_id, allowed=allowed)
            await _unless_closed(self._harness.answer(asked.request_key, Answer.ALLOW if allowed else Answer.DENY))
        else:
            self._write(self._assembler.answered(asked.tool_call_id, gate.answer_json or "null"))
            await _unless_closed(self._harness.answer_question(asked.request_key, gate.answer_json or "null"))

    async def _decline(self, asked: PermissionAsked | QuestionAsked, answer: Answer) -> None:
        if isinstance(asked, PermissionAsked):
            if answer is Answer.DENY:
                self._assembler.decided(asked.tool_call_id, allowed=False)
            await _unless_closed(self._harness.answer(asked.request_key, answer))
        else:
            self._write(self._assembler.answered(asked.tool_call_id, None))
            await _unless_closed(self._harness.answer_question(asked.request_key, None))

    def _policy(self, asked: PermissionAsked) -> Policy:
        policy = gates.decide(self._spec.permissions, (asked.title, asked.kind), self._room.settings.permission)
        if policy is Policy.ASK and len(asked.input_json.encode()) > _INPUT_BYTES:
            # Nobody can approve what nobody can be shown.
            logger.warning("a call is too large to ask for", extra={"session": str(self._execution.key)})
            return Policy.DENY
        return policy

    async def _apply_policy(self, asked: PermissionAsked, *, allowed: bool) -> None:
        self._assembler.decided(asked.tool_call_id, allowed=allowed)
        entity_id = self._assembler.entity_of(asked.tool_call_id)
        name = interaction_id(self._execution.execution_id, entity_id, asked.request_key)
        self._tell(name, "policy", gates.resolved_by_policy(name, entity_id, allowed))
        with self._limits.frozen():
            await _unless_closed(self._harness.answer(asked.request_key, Answer.ALLOW if allowed else Answer.DENY))

    def _tell_of_decision(self, gate: NewGate, before: Gate) -> None:
        name = self._id_of(gate)
        decisions = {Decision.ALLOWED: event_pb2.DECISION_ALLOWED, Decision.DENIED: event_pb2.DECISION_DENIED}
        resolved = event_pb2.InteractionResolved(
            interaction_id=name,
            tool_call_id=gate.tool_call_id,
            resolution=event_pb2.INTERACTION_RESOLUTION_CONSUMED,
            decided_by=before.answered_by or "",
        )
        if before.decision is not None:
            resolved.decision = decisions[before.decision]
        self._tell(name, "decided", resolved)

    def _tell(self, name: str, transition: str, resolved: event_pb2.InteractionResolved) -> None:
        event = event_pb2.Event(
            event_id=derived_id("interaction", name, transition),
            scope=event_pb2.EVENT_SCOPE_SESSION,
            type="interaction.resolved",
            entity_id=name,
            execution_id=self._execution.execution_id,
            occurred_at=facts.timestamp(self._room.clock.now()),
            interaction_resolved=resolved,
        )
        # Told in passing: a crash that loses it loses no decision, for the tool's own event says what became of it.
        self._room.producer.append(self._execution.key.message(), event).add_done_callback(_note_refused)

    # What is asked

    def _gate(self, asked: PermissionAsked | QuestionAsked) -> NewGate:
        entity_id = self._assembler.entity_of(asked.tool_call_id)
        if isinstance(asked, PermissionAsked):
            return NewGate(
                tool_call_id=entity_id,
                request_key=asked.request_key,
                kind=GateKind.APPROVAL,
                tool_name=asked.title or asked.kind or "tool",
                input_json=asked.input_json,
                options=[
                    event_pb2.InteractionOption(option_id=one.option_id, name=one.name, kind=one.kind)
                    for one in asked.options
                ],
            )
        return NewGate(
            tool_call_id=entity_id if asked.client_tool else "",
            request_key=asked.request_key,
            kind=GateKind.CLIENT_TOOL if asked.client_tool else GateKind.QUESTION,
            tool_name=(asked.prompt or "tool") if asked.client_tool else "",
            input_json=asked.input_json,
            prompt="" if asked.client_tool else asked.prompt,
            schema_json=asked.schema_json,
        )

    def _id_of(self, gate: NewGate) -> str:
        return interaction_id(self._execution.execution_id, gate.tool_call_id, gate.request_key)


def _call(gate: NewGate) -> Call:
    return gate.kind, gate.tool_name, gate.prompt, gates.input_digest(gate.input_json)


async def _unless_closed(answering: Awaitable[None]) -> None:
    """Give an answer, unless a cancel has answered in its place."""
    try:
        await answering
    except HarnessError as error:
        if error.reason != "INTERACTION_CLOSED":
            raise


def _note_refused(appended: asyncio.Future[history_pb2.AppendResult]) -> None:
    if not appended.cancelled() and (error := appended.exception()) is not None:
        logger.warning("an answer that was given at once was not told", extra={"cause": str(error)})
