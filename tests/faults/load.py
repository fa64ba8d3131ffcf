"""Load that never waits for the history: sessions that run one execution after the other, and write all of it down.

`python -m tests.faults.load --history A --relay B --journal FILE ...` runs until SIGTERM, then lets each execution end
and exits with 0. Started again after a kill it ends what the one before left open, as a takeover does.

Now and then an execution is taken over while its writer goes on without knowing: what that one says must reach nobody.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
from collections.abc import Sequence
from pathlib import Path

import grpc.aio

from hearth.channel import open_channel
from hearth.errors import CallError
from hearth.history.v1 import history_pb2, history_service_pb2, history_service_pb2_grpc
from hearth.producer import ExecutionWriter, Producer, ProducerLimits
from hearth.types.v1 import content_pb2, event_pb2, frame_pb2, session_pb2
from services.chassis.clock import SystemClock
from tests.faults.journal import Journal
from tests.support import events
from tests.support.recording import Key

PROJECT = "faults"
# Little, so that a short outage fills it and the rest goes through the file.
MEMORY_BYTES = 20_000
_STORED = frozenset({history_pb2.APPEND_OUTCOME_APPENDED, history_pb2.APPEND_OUTCOME_DUPLICATE})


class Turn:
    """One writer of one execution, and what it says."""

    def __init__(self, talker: Talker, writer: ExecutionWriter) -> None:
        self.writer = writer
        self.execution = writer.execution
        self._talker = talker
        self._run = (writer.execution.execution_id, writer.execution.epoch)
        self._said = 0

    def start(self) -> asyncio.Future[history_pb2.AppendResult]:
        """The execution begins."""
        event = event_pb2.Event(execution_started=event_pb2.ExecutionStarted(agent="load"))
        future = self.writer.event(event)
        self._talker.promise(event, future)
        return future

    async def message(self, pieces: int, pause: float) -> None:
        """A message, piece by piece, then whole."""
        entity, text = self._next("m"), ""
        for piece in range(pieces):
            part = f"{piece} of {entity}, "
            self._frame(entity, text_delta=frame_pb2.TextDelta(text=part))
            text += part
            await asyncio.sleep(pause)
        body = event_pb2.MessageCompleted(
            message_id=entity,
            role=content_pb2.ROLE_AGENT,
            content=[content_pb2.ContentPart(text=content_pb2.TextPart(text=text))],
            finish_reason="end",
        )
        event = event_pb2.Event(message_completed=body)
        self._talker.promise(event, self.writer.event(event))

    def tools(self, count: int) -> None:
        """Tool calls, begun in frames and told in one atomic set."""
        made = []
        for _ in range(count):
            entity = self._next("t")
            self._frame(entity, tool_started=frame_pb2.ToolStarted(name="ls"))
            made.append(_tool(entity))
        future = self.writer.atomic(made)
        self._talker.promise_all(made, future)

    def end(self, *, last_tools: int, failed: bool) -> asyncio.Future[history_pb2.AppendResult]:
        """The ending, with tool calls in one atomic set."""
        event = event_pb2.Event()
        if failed:
            event.execution_failed.code = "HISTORY_UNAVAILABLE"
        else:
            event.execution_completed.finish_reason = "end_turn"
        before = [_tool(self._next("t")) for _ in range(last_tools)]
        future = self.writer.ending(event, before=before)
        if before:
            # What became of those is told to nobody; the log shows them.
            self._talker.journal.sent(self._talker.key, *before, line=self._talker.line)
        self._talker.promise(event, future, corrected=True)
        return future

    def _frame(self, entity: str, **body: frame_pb2.TextDelta | frame_pb2.ToolStarted) -> None:
        index = self.writer.frame(entity, **body)  # type: ignore[arg-type]
        frame = frame_pb2.Frame(frame_index=index, entity_id=entity, **body)  # type: ignore[arg-type]
        self._talker.journal.frame(self._talker.key, self._run, frame)

    def _next(self, kind: str) -> str:
        self._said += 1
        return f"{kind}{self._run[1]}-{self._said}"


class Talker:
    """One session."""

    def __init__(self, producer: Producer, journal: Journal, session: str, chance: random.Random) -> None:
        self.journal = journal
        self.key: Key = (PROJECT, session)
        self.session = session_pb2.SessionKey(project=PROJECT, session=session)
        self.line = "producer"
        self.epoch = 0
        self._producer = producer
        self._chance = chance
        self._behind: set[asyncio.Task[None]] = set()

    def promise(
        self, event: event_pb2.Event, future: asyncio.Future[history_pb2.AppendResult], *, corrected: bool = False
    ) -> None:
        """Write down that an event is on its way, and its answer when it comes."""
        (number,) = self.journal.sent(self.key, event, line=self.line)

        def answered(done: asyncio.Future[history_pb2.AppendResult]) -> None:
            if not done.cancelled() and done.exception() is None:
                self.journal.acknowledged(number, done.result(), event if corrected else None)

        future.add_done_callback(answered)

    def promise_all(
        self, made: Sequence[event_pb2.Event], future: asyncio.Future[list[history_pb2.AppendResult]]
    ) -> None:
        """The same for an atomic set."""
        numbers = self.journal.sent(self.key, *made, line=self.line)

        def answered(done: asyncio.Future[list[history_pb2.AppendResult]]) -> None:
            if not done.cancelled() and done.exception() is None:
                for number, result in zip(numbers, done.result(), strict=True):
                    self.journal.acknowledged(number, result)

        future.add_done_callback(answered)

    async def run(self, history: grpc.aio.Channel, done: asyncio.Event) -> None:
        """Talk until told to stop."""
        await self._take_over_from_before(history)
        while not done.is_set():
            try:
                await self._execution(done)
            except CallError:
                # Refused: the execution goes on without this writer, or ends as failed.
                await asyncio.sleep(0.05)
        await asyncio.gather(*self._behind)

    async def _execution(self, done: asyncio.Event) -> None:
        chance = self._chance
        self.epoch += 1
        turn = Turn(self, self._producer.writer(self.session, events.new_id(), self.epoch))
        self._fact(events.user_message(f"input of epoch {self.epoch}"))
        started = turn.start()
        if chance.random() < 0.5:
            await started
        for _ in range(chance.randint(3, 25)):
            if turn.writer.refused.done() or done.is_set():
                break
            try:
                await self._say(turn)
            except CallError:
                break
        if turn.writer.refused.done():
            refusal = turn.writer.refused.result()
            if refusal.reason == "HISTORY_UNAVAILABLE":
                await turn.end(last_tools=0, failed=True)
            return
        if chance.random() < 0.25 and not done.is_set():
            self._take_over(turn)
            return
        await turn.end(last_tools=chance.choice([0, 0, 2]), failed=False)

    async def _say(self, turn: Turn) -> None:
        chance = self._chance
        await turn.message(chance.randint(1, 12), chance.choice([0.0, 0.005, 0.02]))
        if chance.random() < 0.2:
            turn.tools(chance.randint(1, 3))
        if chance.random() < 0.1:
            self._fact(events.input_queued())
        await asyncio.sleep(chance.uniform(0.0, 0.15))

    def _take_over(self, turn: Turn) -> None:
        """End the execution in its writer's place, which is not told and goes on."""
        self.epoch += 1
        self._fact(events.Run(self.epoch, turn.execution.execution_id).lost())
        task = asyncio.create_task(self._haunt(turn))
        self._behind.add(task)
        task.add_done_callback(self._behind.discard)

    async def _haunt(self, turn: Turn) -> None:
        try:
            for _ in range(self._chance.randint(1, 20)):
                await turn.message(self._chance.randint(1, 5), 0.01)
                await asyncio.sleep(0.05)
            await turn.end(last_tools=0, failed=False)
        except CallError:
            return

    def _fact(self, event: event_pb2.Event) -> None:
        self.promise(event, self._producer.append(self.session, event))

    async def _take_over_from_before(self, history: grpc.aio.Channel) -> None:
        stub = history_service_pb2_grpc.HistoryServiceStub(history)
        while True:
            try:
                response = await stub.GetHeads(
                    history_service_pb2.GetHeadsRequest(sessions=[self.session]), timeout=5, wait_for_ready=True
                )
                break
            except grpc.aio.AioRpcError:
                await asyncio.sleep(0.1)
        (head,) = response.heads
        # What the process before had on its way may still arrive, at any epoch that it had begun.
        self.epoch = max(head.epoch, self.epoch)
        if head.execution_id and not head.ended:
            self.epoch += 1
            self._fact(events.Run(self.epoch, head.execution_id).lost())


def _tool(call_id: str) -> event_pb2.Event:
    body = event_pb2.ToolCompleted(
        tool_call_id=call_id, name="ls", kind="execute", input_json="{}", status=event_pb2.TOOL_STATUS_SUCCEEDED
    )
    return event_pb2.Event(tool_completed=body)


async def main() -> None:
    """Run until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--history", required=True)
    parser.add_argument("--relay", required=True)
    parser.add_argument("--journal", required=True, type=Path)
    parser.add_argument("--spill", required=True)
    parser.add_argument("--sessions", required=True, help="names, separated by commas")
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--ready", required=True, type=Path, help="file to make once SIGTERM is heard")
    parser.add_argument("--epoch", type=int, default=0, help="begin above this epoch")
    options = parser.parse_args()
    done = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, done.set)
    options.ready.touch()
    journal = Journal(options.journal)
    limits = ProducerLimits(waiting_bytes=MEMORY_BYTES, spill_dir=options.spill, history_answer=4.0, relay_answer=4.0)
    async with open_channel(options.history) as history, open_channel(options.relay) as relay:
        producer = Producer(history=history, relay=relay, clock=SystemClock(), limits=limits)
        await producer.start()
        talkers = []
        for name in options.sessions.split(","):
            talkers.append(Talker(producer, journal, name, random.Random(f"{options.seed} {name} {options.epoch}")))
            talkers[-1].epoch = options.epoch
        try:
            await asyncio.gather(*(talker.run(history, done) for talker in talkers))
        finally:
            await producer.close(20.0)
            await asyncio.sleep(0)
            journal.close()


if __name__ == "__main__":
    asyncio.run(main())
