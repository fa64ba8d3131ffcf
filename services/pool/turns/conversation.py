"""One prompt: what the agent does with it, written for readers as it happens, until its turn ends somehow."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

from hearth.producer import ExecutionWriter, WriterRefused
from hearth.session.v1 import session_pb2 as sessions
from hearth.types.v1 import content_pb2, event_pb2
from services.chassis import crashpoints
from services.pool.control.commands import CLAIM_LEASE, MAX_ATTEMPTS
from services.pool.control.starts import content_of
from services.pool.harness.assembler import FrameOut, Output, TurnAssembler, TurnEnd
from services.pool.harness.port import (
    HarnessError,
    HarnessSession,
    PermissionAsked,
    PromptResult,
    PromptRun,
    QuestionAsked,
    UsageChanged,
)
from services.pool.harness.updates import set_apart
from services.pool.rows import CommandKind
from services.pool.store import PickedUp
from services.pool.turns import agent_spans
from services.pool.turns.asking import Asking
from services.pool.turns.continuing import Decided
from services.pool.turns.limits import LimitWatch
from services.pool.turns.pausing import Pause
from services.pool.turns.persistence import until_it_lands
from services.pool.turns.preparing import Ready, trace_context
from services.pool.turns.room import Fenced, TurnRoom
from services.pool.turns.signals import Signals, end, first_of
from services.pool.turns.stages import Stages
from services.pool.turns.verdicts import Answer, Asked

logger = logging.getLogger(__name__)
crashpoint = crashpoints.declare("pool", "prompt.sending", "prompt.sent")

# For an agent that is to go on with nothing that it could be told.
_NOTHING_TO_SAY = "Nobody answered what you asked. Go on without it."


class Conversation:
    """The prompt of one execution. `writer` takes its output; `signals` tell what happens around it; `look` has its row
    read soon."""

    def __init__(
        self,
        room: TurnRoom,
        picked: PickedUp,
        *,
        spec: sessions.SessionSpec,
        writer: ExecutionWriter,
        stages: Stages,
        signals: Signals,
        look: Callable[[], None],
    ) -> None:
        self._room = room
        self._picked = picked
        self._spec = spec
        self._writer = writer
        self._stages = stages
        self._signals = signals
        self._look = look
        self._assembler = TurnAssembler(picked.execution.execution_id, room.ids.new)
        self._agent = spec.agent or room.settings.default_agent
        self._tools = agent_spans.ToolSpans()
        self._began = 0.0
        self._first_output_at: float | None = None
        self._asked = Asked.NOBODY
        # The cancel that this turn was stopped by.
        self.command_id = ""
        # When the agent was asked, on the monotonic clock.
        self.prompted_at = 0.0
        # Nobody is waited for any longer, and the agent is told nothing more.
        self.pause: Pause | None = None

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
        execution = self._picked.execution
        # Before its ending: whoever settles that takes it from the row what the agent has been told.
        await until_it_lands(
            self._room.clock,
            execution.key,
            "not asked",
            lambda: self._room.store.unasked(execution, self._room.holder),
        )
        return Answer(self._asked)

    async def run(self, ready: Ready, note: str = "", decided: Decided | None = None) -> Answer:
        """Ask, and follow the agent to the end of its turn. Raises `Fenced` when somebody else has the session now.

        `note` is told before the message; `decided` is what people said of calls that were asked for before.
        """
        with agent_spans.asked(self._agent, self._picked.execution.key.session) as span:
            try:
                answer = await self._ask(ready, note, decided or Decided())
            finally:
                self._tools.close()
            agent_spans.answered(span, answer, self.usage)
        return answer

    async def _ask(self, ready: Ready, note: str, decided: Decided) -> Answer:
        harness = ready.live.harness
        self._began = self.prompted_at = self._room.clock.monotonic()
        crashpoint("prompt.sending")
        if not await self._room.trust.confirm(self._picked.execution):
            raise Fenced
        try:
            run = await harness.prompt(
                self._prompt(ready.transcript, note),
                execution_id=self._picked.execution.execution_id,
                trace_context=trace_context(),
            )
        except HarnessError as error:
            return self._harness_failed(error)
        crashpoint("prompt.sent")
        # From here on: what came before has times of its own.
        settings = self._room.settings.limits.with_spec(self._spec.limits)
        limits = LimitWatch(settings, self._room.clock)
        asking = Asking(
            self._room,
            self._picked.execution,
            self._spec,
            entry=ready.entry,
            harness=harness,
            assembler=self._assembler,
            limits=limits,
            signals=self._signals,
            decided=decided,
            tool_call_limit=settings.tool_call,
            write=self._write,
            look=self._look,
        )
        following = asyncio.create_task(self._follow(run, limits, asking))
        limit = asyncio.create_task(limits.tripped())
        answering = asyncio.create_task(asking.run())
        try:
            answer = await self._until_the_end(harness, asking, following, limit, answering)
        finally:
            await end(following, limit, answering)
            asking.close()
        if self._first_output_at is not None:
            # Not shown: the ending comes at once, and would have to wait for that frame.
            self._timed("model", self._first_output_at, show=False)
        else:
            self._timed("first_output", self._began)
        return answer

    def _prompt(self, transcript: str, note: str) -> Sequence[content_pb2.ContentPart]:
        content = list(content_of(self._picked.content))
        if note or not content:
            words = set_apart(note) if content else note or _NOTHING_TO_SAY
            content.insert(0, content_pb2.ContentPart(text=content_pb2.TextPart(text=words)))
        if transcript:
            data = set_apart(transcript).encode()
            context = content_pb2.InlineMediaPart(media_type="text/markdown", data=data)
            content.insert(0, content_pb2.ContentPart(inline_media=context))
        return content

    async def _until_the_end(
        self,
        harness: HarnessSession,
        asking: Asking,
        following: asyncio.Task[PromptResult],
        limit: asyncio.Task[str],
        answering: asyncio.Task[Pause],
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
                if answering.done():
                    return self._paused(answering)
                asking.wake()
                left = None if answer_due is None else answer_due - self._room.clock.monotonic()
                # A turn that waits for people is not cut off by the end of the process: it is paused.
                cut_off = self._signals.shut_down and not asking.waiting
                if left is None and (self._signals.stopping or cut_off):
                    answer_due = self._room.clock.monotonic() + self._room.settings.cancel_timeout
                    await self._cancel(harness)
                    continue
                if left is not None and left <= 0:
                    logger.warning("agent did not answer a cancel", extra={"session": str(self._picked.execution.key)})
                    return Answer(self._asked, produced=self._assembler.produced_anything)
                await first_of(following, limit, answering, signal, self._writer.refused, timeout=left)
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

    def _paused(self, answering: asyncio.Task[Pause]) -> Answer:
        try:
            self.pause = answering.result()
        except HarnessError as error:
            return self._harness_failed(error)
        except WriterRefused as error:
            raise Fenced(error.refusal.current_epoch) from error
        return Answer(self._asked, produced=True, paused=self.pause.interaction_ids)

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
            lambda: self._room.store.claim_cancel(
                execution.execution_id, self._room.holder, CLAIM_LEASE, attempts=MAX_ATTEMPTS
            ),
        )
        if command is not None:
            self.command_id = command.command_id
            self._asked = Asked.STEER if command.kind is CommandKind.STEER else Asked.USER

    async def _follow(self, run: PromptRun, limits: LimitWatch, asking: Asking) -> PromptResult:
        async for update in run.updates():
            outputs = self._assembler.take(update)
            # Some agents list their commands as soon as they are asked, or count what they send to their model: nobody
            # reads that, and it is no answer.
            said = bool(outputs) and not isinstance(update, UsageChanged)
            said = said or isinstance(update, PermissionAsked | QuestionAsked)
            limits.progress(output=said)
            if said:
                self._note_output()
            self._write(outputs)
            limits.running_tools(self._assembler.running_tools)
            asking.heard()
            if isinstance(update, PermissionAsked | QuestionAsked):
                await asking.requested(update)
        return await run.result()

    def _write(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            self._tools.take(output)
            if isinstance(output, FrameOut):
                self._writer.frame(output.entity_id, **output.body)
            else:
                self._writer.event(output.event)

    def _note_output(self) -> None:
        if self._first_output_at is None:
            self._first_output_at = self._room.clock.monotonic()
            self._timed("first_output", self._began)
            self._stages.show()

    def _timed(self, name: str, started: float, *, show: bool = True) -> None:
        seconds = self._stages.record(name, started, show=show)
        self._room.metrics.stage(name, "", seconds)
