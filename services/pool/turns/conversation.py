"""One prompt: what the agent does with it, written for readers as it happens, until its turn ends somehow."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Sequence

from hearth.history.v1 import history_pb2
from hearth.producer import ExecutionWriter, WriterRefused
from hearth.session.v1 import session_pb2 as sessions
from hearth.types.v1 import content_pb2, event_pb2
from services.chassis import crashpoints
from services.chassis.clock import derived_id
from services.pool.control import facts, gates
from services.pool.control.commands import CLAIM_LEASE
from services.pool.control.gates import Policy
from services.pool.control.inputs import content_of
from services.pool.harness.assembler import FrameOut, TurnAssembler, TurnEnd
from services.pool.harness.port import (
    Answer as ToolAnswer,
)
from services.pool.harness.port import (
    HarnessError,
    HarnessSession,
    PermissionAsked,
    PromptResult,
    PromptRun,
    QuestionAsked,
)
from services.pool.store import PickedUp
from services.pool.turns.limits import LimitWatch
from services.pool.turns.persistence import until_it_lands
from services.pool.turns.preparing import Ready, trace_context
from services.pool.turns.room import Fenced, TurnRoom
from services.pool.turns.signals import Signals, end, first_of
from services.pool.turns.stages import Stages
from services.pool.turns.verdicts import Answer, Asked

logger = logging.getLogger(__name__)
crashpoint = crashpoints.declare("pool", "prompt.sending", "prompt.sent")


class Conversation:
    """The prompt of one execution. `writer` takes its output; `signals` tell what happens around it."""

    def __init__(
        self,
        room: TurnRoom,
        picked: PickedUp,
        *,
        spec: sessions.SessionSpec,
        writer: ExecutionWriter,
        stages: Stages,
        signals: Signals,
    ) -> None:
        self._room = room
        self._picked = picked
        self._spec = spec
        self._writer = writer
        self._stages = stages
        self._signals = signals
        self._assembler = TurnAssembler(picked.execution.execution_id, room.ids.new)
        self._began = 0.0
        self._first_output_at: float | None = None
        self._asked = Asked.NOBODY
        # The cancel that this turn was stopped by.
        self.command_id = ""
        # When the agent was asked, on the monotonic clock.
        self.prompted_at = 0.0

    @property
    def streamed(self) -> bool:
        """Whether readers may have seen anything of it."""
        return self._first_output_at is not None

    @property
    def usage(self) -> content_pb2.Usage:
        """Usage as far as it is known."""
        return self._assembler.usage

    def rest(self, output: TurnEnd, result: PromptResult | None) -> list[event_pb2.Event]:
        """The events that complete what is still open."""
        return self._assembler.finish(output, result.usage if result is not None else None)

    async def stop_unasked(self) -> Answer:
        """The answer of a turn that was stopped before the agent was asked."""
        await self._claim_cancel()
        return Answer(self._asked)

    async def run(self, ready: Ready) -> Answer:
        """Ask, and follow the agent to the end of its turn. Raises `Fenced` when somebody else has the session now."""
        harness = ready.live.harness
        self._began = self.prompted_at = self._room.clock.monotonic()
        crashpoint("prompt.sending")
        try:
            run = await harness.prompt(
                self._prompt(ready.transcript),
                execution_id=self._picked.execution.execution_id,
                trace_context=trace_context(),
            )
        except HarnessError as error:
            return self._harness_failed(error)
        crashpoint("prompt.sent")
        # From here on: what came before has times of its own.
        limits = LimitWatch(self._room.settings.limits.with_spec(self._spec.limits), self._room.clock)
        following = asyncio.create_task(self._follow(harness, run, limits))
        limit = asyncio.create_task(limits.tripped())
        try:
            answer = await self._until_the_end(harness, following, limit)
        finally:
            await end(following, limit)
        if self._first_output_at is not None:
            # Not shown: the ending comes at once, and would have to wait for that frame.
            self._timed("model", self._first_output_at, show=False)
        else:
            self._timed("first_output", self._began)
        return answer

    def _prompt(self, transcript: str) -> Sequence[content_pb2.ContentPart]:
        content = content_of(self._picked.content)
        if not transcript:
            return content
        context = content_pb2.InlineMediaPart(media_type="text/markdown", data=transcript.encode())
        return [content_pb2.ContentPart(inline_media=context), *content]

    async def _until_the_end(
        self, harness: HarnessSession, following: asyncio.Task[PromptResult], limit: asyncio.Task[str]
    ) -> Answer:
        answer_due: float | None = None
        signal = asyncio.create_task(self._signals.next())
        try:
            while True:
                self._check_fence()
                if following.done():
                    return self._answered(following)
                ended = self._ended_otherwise(limit)
                if ended is not None:
                    return ended
                left = None if answer_due is None else answer_due - self._room.clock.monotonic()
                if left is None and (self._signals.stopping or self._signals.shut_down):
                    answer_due = self._room.clock.monotonic() + self._room.settings.cancel_timeout
                    await self._cancel(harness)
                    continue
                if left is not None and left <= 0:
                    logger.warning("agent did not answer a cancel", extra={"session": str(self._picked.execution.key)})
                    return Answer(self._asked, produced=self._assembler.produced_anything)
                await first_of(following, limit, signal, self._writer.refused, timeout=left)
                if signal.done():
                    signal = asyncio.create_task(self._signals.next())
        finally:
            await end(signal)

    def _check_fence(self) -> None:
        if self._signals.fenced or self._signals.taken:
            raise Fenced
        if self._writer.refused.done():
            refusal = self._writer.refused.result()
            if refusal.reason != "HISTORY_UNAVAILABLE":
                raise Fenced(refusal.current_epoch)

    def _ended_otherwise(self, limit: asyncio.Task[str]) -> Answer | None:
        if self._writer.refused.done():
            return self._failed("HISTORY_UNAVAILABLE", "too much output waits for the history, which does not answer")
        if self._signals.gone:
            return self._failed(*self._signals.loss)
        if limit.done():
            return self._failed(limit.result(), "the turn was ended because it passed a limit")
        return None

    def _answered(self, following: asyncio.Task[PromptResult]) -> Answer:
        try:
            result = following.result()
        except HarnessError as error:
            return self._harness_failed(error)
        except WriterRefused as error:
            if error.refusal.reason == "HISTORY_UNAVAILABLE":
                return self._failed(error.refusal.reason, "too much output waits for the history")
            raise Fenced(error.refusal.current_epoch) from error
        return Answer(self._asked, result, produced=self._assembler.produced_anything)

    def _harness_failed(self, error: HarnessError) -> Answer:
        # The claim stands, so nobody took the daemon: it was restarted, and what ran in it is gone.
        return self._failed("HARNESS_UNREACHABLE" if error.fenced else error.reason, str(error))

    def _failed(self, code: str, message: str) -> Answer:
        return Answer(self._asked, code=code, message=message, produced=self._assembler.produced_anything)

    async def _cancel(self, harness: HarnessSession) -> None:
        await self._claim_cancel()
        try:
            await harness.cancel()
        except HarnessError as error:
            logger.warning(
                "cancel was not delivered",
                extra={"session": str(self._picked.execution.key), "reason": error.reason},
            )

    async def _claim_cancel(self) -> None:
        if not self._signals.stopping:
            self._asked = Asked.SHUTDOWN
            return
        self._asked = Asked.USER
        execution = self._picked.execution
        command = await until_it_lands(
            self._room.clock,
            execution.key,
            "claim a cancel",
            lambda: self._room.store.claim_cancel(execution.execution_id, self._room.holder, CLAIM_LEASE),
        )
        if command is not None:
            self.command_id = command.command_id

    async def _follow(self, harness: HarnessSession, run: PromptRun, limits: LimitWatch) -> PromptResult:
        async for update in run.updates():
            outputs = self._assembler.take(update)
            # Some agents list their commands as soon as they are asked: nobody reads that, and it is no answer.
            said = bool(outputs) or isinstance(update, PermissionAsked | QuestionAsked)
            limits.progress(output=said)
            if said:
                self._note_output()
            for output in outputs:
                if isinstance(output, FrameOut):
                    self._writer.frame(output.entity_id, **output.body)
                else:
                    self._writer.event(output.event)
            limits.running_tools(self._assembler.open_tools)
            if isinstance(update, PermissionAsked):
                with limits.frozen():
                    await self._permit(harness, update)
            elif isinstance(update, QuestionAsked):
                # Nobody can be asked yet; an agent that is told so goes on without an answer.
                await _unless_closed(harness.answer_question(update.request_key, None))
        return await run.result()

    def _note_output(self) -> None:
        if self._first_output_at is None:
            self._first_output_at = self._room.clock.monotonic()
            self._timed("first_output", self._began)
            self._stages.show()

    async def _permit(self, harness: HarnessSession, asked: PermissionAsked) -> None:
        """Answer by the policy. After a Stop nothing new may start, whatever the policy says."""
        if self._asked is not Asked.NOBODY or self._signals.any:
            await _unless_closed(harness.answer(asked.request_key, ToolAnswer.CANCELLED))
            return
        policy = gates.decide(self._spec.permissions, (asked.title, asked.kind), self._room.settings.permission)
        allowed = policy is Policy.ALLOW
        self._assembler.decided(asked.tool_call_id, allowed=allowed)
        self._tell_of(asked, allowed)
        await _unless_closed(harness.answer(asked.request_key, ToolAnswer.ALLOW if allowed else ToolAnswer.DENY))

    def _tell_of(self, asked: PermissionAsked, allowed: bool) -> None:
        execution = self._picked.execution
        interaction_id = derived_id("interaction", execution.execution_id, asked.tool_call_id, asked.request_key)
        event = event_pb2.Event(
            event_id=derived_id("interaction", interaction_id, "policy"),
            scope=event_pb2.EVENT_SCOPE_SESSION,
            type="interaction.resolved",
            entity_id=interaction_id,
            execution_id=execution.execution_id,
            occurred_at=facts.timestamp(self._room.clock.now()),
            interaction_resolved=gates.resolved_by_policy(
                interaction_id, self._assembler.entity_of(asked.tool_call_id), allowed
            ),
        )
        # Told in passing: a crash that loses it loses no decision, for the tool's own event says what became of it.
        self._room.producer.append(execution.key.message(), event).add_done_callback(_note_refused)

    def _timed(self, name: str, started: float, *, show: bool = True) -> None:
        seconds = self._stages.record(name, started, show=show)
        self._room.stats.stage(name, "", seconds)


async def _unless_closed(answering: Awaitable[None]) -> None:
    """Give an answer, unless a cancel has answered in its place."""
    try:
        await answering
    except HarnessError as error:
        if error.reason != "INTERACTION_CLOSED":
            raise


def _note_refused(appended: asyncio.Future[history_pb2.AppendResult]) -> None:
    if not appended.cancelled() and (error := appended.exception()) is not None:
        logger.warning("an answer of the policy was not told", extra={"cause": str(error)})
