"""One turn, stage by stage: acquire and open beside the acknowledgement of its start, RUNNING before the prompt, the
prompt, the ending that history takes, the settlement by it, and the parking of the agent.

Up to the prompt anything may end it for nothing: it is given back, or ended by the pool. From the prompt on there is
one ending, and the agent is kept only if it gave that ending itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from opentelemetry import trace

from hearth.sandbox.v1 import sandbox_pb2
from hearth.types.v1 import event_pb2
from services.chassis import crashpoints, telemetry
from services.pool.control.executions import Winner
from services.pool.control.settlement import Settled
from services.pool.harness.port import HarnessError
from services.pool.rows import ExecutionState, Gate, GateState, Outcome
from services.pool.store import PickedUp
from services.pool.turns import continuing, leftovers
from services.pool.turns.continuing import Decided
from services.pool.turns.conversation import Conversation
from services.pool.turns.endings import append_ending, end_failed
from services.pool.turns.leaving import Reason, may_still_work, release_reason
from services.pool.turns.liveness import Liveness
from services.pool.turns.persistence import until_it_lands
from services.pool.turns.preparing import Preparation, Ready
from services.pool.turns.room import Fenced, Preempted, TurnFailed, TurnRoom
from services.pool.turns.signals import Signals, end, first_of, together, within
from services.pool.turns.stages import Stages
from services.pool.turns.starting import StartInLog
from services.pool.turns.verdicts import Answer, Kind, Summary, Verdict, ending, fill, verdict
from services.pool.warm.entries import Entry, Live

logger = logging.getLogger(__name__)
crashpoint = crashpoints.declare(
    "pool", "turn.answered", "turn.ending_taken", "turn.settled", "pause.ending_taken", "pause.settled"
)

# How long the way to a kept agent may take to open; then it costs a cold start.
_RESUME_SECONDS = 5.0
# How often an agent is got ready whose sandbox is gone before it was asked.
_ATTEMPTS = 3
# How long an ending waits for an agent that may still work to be done away with.
_DISCARD_SECONDS = 15.0

_T = TypeVar("_T")


class Turn:
    """The turn of one picked-up execution. `told` is done when history has the facts that it starts from."""

    def __init__(self, room: TurnRoom, picked: PickedUp, told: asyncio.Future[None], *, admitted_at: float) -> None:
        execution = picked.execution
        self._room = room
        self._picked = picked
        self._key = execution.key
        self._start = StartInLog(room, picked, told)
        self._admitted_at = admitted_at
        self._signals = Signals()
        self._look = asyncio.Event()
        self._writer = room.producer.writer(self._key.message(), execution.execution_id, execution.epoch)
        self._stages = Stages(self._writer, room.clock)
        self._preparation = Preparation(room, picked, self._stages, self._claim_lost)
        self._conversation = Conversation(
            room,
            picked,
            spec=self._preparation.spec,
            writer=self._writer,
            stages=self._stages,
            signals=self._signals,
            look=self.look,
        )
        # What people decided before, and this turn passes on.
        self._carried: Sequence[Gate] = ()
        # Its ending is the one that stands, and its agent is in the middle of its turn.
        self._paused = False
        self._how = ""
        # Of getting an agent ready; each has a claim of its own.
        self._attempt = 0
        self._resuming: asyncio.Task[None] | None = None
        # Its ending is on its way to the log, and so may be seen by readers already; and it is known to be there.
        self.ending = False
        self.ended = False
        # It is over, its agent parked or gone.
        self.over = asyncio.Event()

    @property
    def execution_id(self) -> str:
        """The execution that it runs."""
        return self._picked.execution.execution_id

    @property
    def epoch(self) -> int:
        """At which it runs."""
        return self._picked.execution.epoch

    def look(self) -> None:
        """The rows of the session changed."""
        self._look.set()

    def fence(self, epoch: int) -> None:
        """The session went on to `epoch`."""
        if epoch > self._picked.execution.epoch:
            self._signals.raise_(fenced=True)

    def let_go(self) -> None:
        """The process ends soon: wait for nobody any more."""
        self._signals.raise_(leaving=True)

    def shut_down(self) -> None:
        """End it soon."""
        self._signals.raise_(shut_down=True)

    async def run(self) -> None:
        """Run it to its end, whichever that is."""
        execution = self._picked.execution
        with telemetry.span(
            "turn",
            parent=execution.traceparent or None,
            attributes={
                "hearth.project": self._key.project,
                "hearth.session": self._key.session,
                "hearth.execution": execution.execution_id,
                "hearth.epoch": execution.epoch,
            },
        ) as span:
            self._writer.traced(telemetry.inject())
            watching = asyncio.create_task(self._watch())
            try:
                await self._run(span)
            finally:
                self._stages.show()
                await end(watching)

    async def _run(self, span: trace.Span) -> None:
        self._timed("admit", self._admitted_at)
        try:
            try:
                answer = await self._until_answered()
            finally:
                await self._end_resuming()
            span.set_attribute("hearth.how", self._how)
            await self._finish(answer, span)
        except Preempted:
            await self._step_back()
        except Fenced as fenced:
            await self._drop(fenced)
        except TurnFailed as failed:
            span.set_attribute("hearth.outcome", "failed")
            telemetry.mark_failed(span, failed.code)
            await self._fail(failed)

    # Towards the answer

    async def _until_answered(self) -> Answer:
        running = False
        while True:
            ready = await self._unless_told(self._get_ready(), running=running)
            if ready is None:
                return await self._conversation.stop_unasked()
            if self._signals.gone and self._attempt < _ATTEMPTS:
                # Its claim was lost on the way here; nothing was asked of it.
                await self._start_over(ready.entry, "instance", "the claim was lost")
                continue
            self._how = self._how or ready.how
            await self._commit_running(ready)
            running = True
            if self._carried:
                await self._unless_told(self._carried_in_log(), running=True)
            resumed = await self._unless_told(self._resumed(ready), running=True) if self._resuming else True
            if not resumed and not self._signals.stopping and not self._signals.shut_down:
                continue
            if self._signals.stopping or self._signals.shut_down:
                return await self._conversation.stop_unasked()
            answer = await self._ask(ready)
            failed = verdict(answer)
            again = ready.continued and failed.kind is Kind.FAILED and not self._conversation.streamed
            # What was approved is handed over at most once.
            again = again and not self._carried
            if not again or self._signals.stopping or self._signals.shut_down or self._writer.refused.done():
                ready.live.last_execution_id = self.execution_id
                return answer
            await self._start_over(ready.entry, "continuation", failed.reason)

    async def _ask(self, ready: Ready) -> Answer:
        """Ask the agent, and look after what it runs in until it has answered."""
        liveness = Liveness(
            self._room.sandboxes,
            self._room.clock,
            self._signals,
            key=self._key,
            claim=ready.entry.claim,
            live=ready.live,
        )
        watching = asyncio.create_task(liveness.watch())
        try:
            note = continuing.words(
                self._carried,
                # An agent that was there knows what came of it.
                uncertain=self._preparation.uncertain if not ready.continued else (),
                unanswered=[gate for gate in self._picked.continued if gate.state is GateState.CLOSED],
            )
            return await self._conversation.run(ready, note, Decided(self._carried))
        finally:
            await end(watching)

    async def _start_over(self, entry: Entry, what: str, why: str) -> None:
        """Close what cannot go on, to start anew under the next attempt."""
        self._room.metrics.missed(what)
        logger.warning("starting cold", extra={"session": str(self._key), "lost": what, "reason": why})
        await self._end_resuming()
        await self._room.entries.close(entry, sandbox_pb2.RELEASE_REASON_FAILED_TURN)
        self._preparation.entry = None
        self._signals.found_again()
        self._how = ""

    async def _get_ready(self) -> Ready:
        ready, _ = await together(self._prepare(), self._start.acknowledged())
        assert isinstance(ready, Ready)
        return ready

    async def _prepare(self) -> Ready:
        while True:
            self._attempt += 1
            try:
                ready = await self._preparation.prepare(self._attempt)
            except TurnFailed as failed:
                # It may be what is left in the sandbox that fails; in a new one nothing is.
                entry = self._preparation.entry
                if entry is None or not self._preparation.opening_kept or self._attempt >= _ATTEMPTS:
                    raise
                await self._start_over(entry, "continuation", failed.code)
                continue
            try:
                await self._preparation.bring_files(ready)
                break
            except HarnessError as error:
                if not ready.continued:
                    raise TurnFailed(error.reason, f"an attachment was not written: {error}") from error
                await self._start_over(ready.entry, "continuation", error.reason)
        if ready.continued:
            # Beside the wait for log and rows: the way to the agent is open when it may be asked.
            self._resuming = asyncio.create_task(ready.live.harness.resume())
        return ready

    async def _resumed(self, ready: Ready) -> bool:
        """Whether the agent can be asked; one that was kept and cannot be reached any more is closed."""
        assert self._resuming is not None
        try:
            # A stream that is opened to a daemon that is gone is tried for long: a new agent is there sooner.
            async with asyncio.timeout(_RESUME_SECONDS):
                await asyncio.shield(self._resuming)
        except TimeoutError:
            await self._start_over(ready.entry, "continuation", "HARNESS_UNREACHABLE")
            return False
        except HarnessError as error:
            await self._start_over(ready.entry, "continuation", error.reason)
            return False
        return True

    async def _end_resuming(self) -> None:
        resuming, self._resuming = self._resuming, None
        if resuming is not None:
            await end(resuming)

    async def _commit_running(self, ready: Ready) -> None:
        """From here on the agent may have been asked; who takes over must not ask again."""
        if await until_it_lands(self._room.clock, self._key, "run", lambda: self._begin(ready.live)):
            return
        await self._read_row()
        if self._signals.fenced:
            raise Fenced
        if not self._signals.stopping:
            raise Preempted

    async def _begin(self, live: Live) -> bool:
        execution, holder, session_id = self._picked.execution, self._room.holder, live.harness.session_id
        if not self._picked.continued:
            return await self._room.store.run(execution, holder, live.agent, session_id)
        carried = await self._room.interactions.begin(execution, holder, live.agent, session_id, self._picked.continued)
        self._carried = carried or ()
        return carried is not None

    async def _carried_in_log(self) -> None:
        """Wait until readers can see that the answers were passed on: what the agent makes of them comes after."""
        await until_it_lands(self._room.clock, self._key, "tell of answers", lambda: self._room.outbox.told(self._key))

    async def _unless_told(self, work: Coroutine[Any, Any, _T], *, running: bool) -> _T | None:
        """The result of `work`, or None when a Stop cut it off that the turn itself has to answer."""
        task = asyncio.create_task(work)
        signal = asyncio.create_task(self._signals.next())
        try:
            while not task.done():
                if self._signals.fenced:
                    raise Fenced
                if running and (self._signals.stopping or self._signals.shut_down):
                    return None
                if self._signals.taken or self._signals.shut_down:
                    raise Preempted
                await first_of(task, signal)
                if signal.done():
                    signal = asyncio.create_task(self._signals.next())
            return task.result()
        finally:
            await end(task, signal)

    # The ending

    async def _finish(self, answer: Answer, span: trace.Span) -> None:
        crashpoint("turn.answered")
        found = verdict(answer)
        entry = self._preparation.entry
        if found.kind is Kind.STOPPED and found.answered and entry is not None and entry.live is not None:
            found = await self._without_leftovers(found, entry)
        if entry is not None and may_still_work(found, prompted=bool(self._conversation.prompted_at)):
            # What is told to have ended must have.
            await within(_DISCARD_SECONDS, self._discard(entry, self._reason()))
        self._stages.show()
        rest = self._conversation.rest(found.output, answer.result)
        event = ending(found, self._summary(answer), command_id=self._conversation.command_id)
        self.ending = True
        try:
            winner = await append_ending(self._writer, self._signals, event, rest)
        except TurnFailed:
            if found.kind is not Kind.PAUSED:
                raise
            await self._leave_to_the_pool(entry)
            return
        self.ended = True
        span.set_attribute("hearth.outcome", winner.outcome.value.lower())
        if found.kind is Kind.FAILED:
            telemetry.mark_failed(span, found.reason)
        self._paused = found.kind is Kind.PAUSED and winner.event_id == event.event_id
        crashpoint("pause.ending_taken" if self._paused else "turn.ending_taken")
        settled = await self._settle(winner)
        crashpoint("pause.settled" if self._paused else "turn.settled")
        self._room.metrics.ended(self._how, winner.outcome.value.lower())
        if entry is not None:
            kept = found.answered and winner.event_id == event.event_id
            await self._park(entry, found if kept else None, settled)

    async def _without_leftovers(self, found: Verdict, entry: Entry) -> Verdict:
        live = entry.live
        assert live is not None
        asked_for = self._room.clock.monotonic() - self._conversation.prompted_at
        clean = await leftovers.end_leftovers(
            live.harness, live.processes, asked_for, isolated=live.provider != "local"
        )
        return found if clean else Verdict(found.kind, found.reason, found.output, answered=False)

    def _summary(self, answer: Answer) -> Summary:
        return Summary(
            self._stages.timings,
            self._how,
            self._preparation.sandbox_id,
            self._conversation.usage,
            answer.result.report_json if answer.result is not None else "",
        )

    async def _settle(self, winner: Winner) -> Settled | None:
        started = self._room.clock.monotonic()
        with telemetry.span("turn.settle"):
            settled = await until_it_lands(
                self._room.clock,
                self._key,
                "settle",
                lambda: self._room.settlement.settle(self._key, self.execution_id, winner),
            )
        self._room.metrics.stage("settle", "", self._room.clock.monotonic() - started)
        return settled

    # What becomes of the agent

    async def _park(self, entry: Entry, found: Verdict | None, settled: Settled | None) -> None:
        """Keep the agent for the next turn where it can take one, else do away with it. `found`: it ended well."""
        entry.turns += 1
        stopped = found is not None and found.kind is Kind.STOPPED
        if found is None or entry.lost or self._signals.fenced or (stopped and self._signals.shut_down):
            await self._discard(entry, self._reason())
        elif settled is None or settled.promoted is None or not self._room.entries.keep(entry, None):
            await self._room.parking.park(entry, stopped=stopped)

    async def _discard(self, entry: Entry, reason: Reason) -> None:
        if self._signals.fenced:
            self._room.entries.drop(entry)
        else:
            await self._room.entries.close(entry, reason)

    def _reason(self) -> Reason:
        """Why a sandbox whose agent is not kept is given back."""
        entry, pause = self._preparation.entry, self._conversation.pause
        return release_reason(
            paused=pause.why if self._paused and pause is not None else None,
            shut_down=self._signals.shut_down,
            prompted=bool(self._conversation.prompted_at),
            kept=entry is not None and entry.live is not None and entry.turns > 0,
        )

    # Other ends

    async def _leave_to_the_pool(self, entry: Entry | None) -> None:
        """A pause could not be written by the turn itself; what people are asked stays open for all that."""
        self._writer.abandon()
        await self._room.recovery.take_over(self._picked.execution, why="its pause could not be written")
        if entry is not None:
            await self._discard(entry, sandbox_pb2.RELEASE_REASON_SHUTDOWN_IN_FLIGHT)

    async def _step_back(self) -> None:
        """The agent was not asked, and will not be: give back what was prepared, and it too if the process ends."""
        self._writer.abandon()
        if self._preparation.entry is not None:
            await self._discard(self._preparation.entry, self._reason())
        if self._signals.shut_down and not self._signals.taken:
            await until_it_lands(self._room.clock, self._key, "give back", self._give_back)

    async def _give_back(self) -> None:
        await self._room.store.give_back(self._picked.execution, self._room.holder)
        # Its agent is gone: whoever picks it up now need not ask here.
        await self._room.store.clear_holder(self._key, self._room.holder)

    async def _drop(self, fenced: Fenced) -> None:
        """Somebody else has the session. Where the rows still name this turn, another service is ahead of them: then
        the execution is taken anew, above what was seen there."""
        self._writer.abandon()
        entry = self._preparation.entry
        if entry is not None:
            self._room.entries.drop(entry)
            self._room.sandboxes.let_go(self._key, entry.claim)
        await self._room.recovery.take_over(self._picked.execution, why="a higher epoch was seen", above=fenced.epoch)

    async def _fail(self, failed: TurnFailed) -> None:
        """No answer can be had: the pool ends it, in the outbox, so that the reason survives a crash."""
        logger.warning(
            "turn failed",
            extra={"session": str(self._key), "execution": self.execution_id, "code": failed.code},
        )
        self._writer.abandon()
        self.ending = True
        summary = event_pb2.EndingSummary()
        fill(summary, Summary(self._stages.timings, self._how, self._preparation.sandbox_id))
        execution = self._picked.execution
        await until_it_lands(
            self._room.clock, self._key, "fail", lambda: end_failed(self._room, execution, failed, summary)
        )
        self._room.metrics.ended(self._how, Outcome.FAILED.value.lower())
        if self._preparation.entry is not None:
            await self._discard(self._preparation.entry, sandbox_pb2.RELEASE_REASON_FAILED_TURN)

    # Signals

    async def _watch(self) -> None:
        """Read the row whenever something was committed, and tell what it says."""
        while True:
            await self._look.wait()
            self._look.clear()
            await until_it_lands(self._room.clock, self._key, "look", self._read_row)

    async def _read_row(self) -> None:
        mine = self._picked.execution
        row = await self._room.store.execution(self._key, mine.execution_id)
        if self.ended:
            return
        if row is None or row.epoch != mine.epoch:
            self._signals.raise_(fenced=True)
        elif row.ending_event_id is not None or row.driver != self._room.holder:
            self._signals.raise_(taken=True)
        elif row.state is ExecutionState.STOPPING:
            self._signals.raise_(stopping=True)
        elif row.state is ExecutionState.WAITING:
            found = await self._room.store.gates(mine.execution_id)
            if any(gate.state in {GateState.ANSWERED, GateState.CLOSED} for gate in found):
                self._signals.raise_(answered=True)

    def _claim_lost(self, entry: Entry, fenced: bool) -> None:
        self._room.entries.lost(entry)
        if not self.over.is_set() and entry is self._preparation.entry:
            self._signals.raise_(fenced=fenced, gone=True)

    def _timed(self, name: str, started: float) -> None:
        self._room.metrics.stage(name, "", self._stages.record(name, started))
