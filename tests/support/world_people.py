"""Who lives in a `World`: conversations, the turns that write in them, and the readers that follow."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import grpc
import grpc.aio

from hearth.errors import CallError
from hearth.producer import ExecutionWriter
from hearth.types.v1 import content_pb2, event_pb2, frame_pb2, session_pb2
from tests.support.recording import Key, Reader
from tests.support.relay_reader import StrictReader

if TYPE_CHECKING:
    from tests.support.world import World

_PAUSE_SECONDS = 0.05
_PASSING = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL})


class Conversation:
    """A session, and what its pool would know of it."""

    def __init__(self, session: session_pb2.SessionKey) -> None:
        self.session = session
        self.key: Key = (session.project, session.session)
        self.epoch = 0
        # Who writes, as far as the pool knows.
        self.current: Turn | None = None
        # What was asked to be removed, by sequence.
        self.gone: dict[int, event_pb2.EventItem] = {}

    def next_epoch(self) -> int:
        """The next one; given out once."""
        self.epoch += 1
        return self.epoch


class Turn:
    """One writer of an execution at one epoch. Once it is refused, what it is asked for has no effect."""

    def __init__(
        self, world: World, conversation: Conversation, writer: ExecutionWriter, line: str, number: int
    ) -> None:
        self.conversation = conversation
        self.key = conversation.key
        self.execution = writer.execution
        self.ended = False
        # Every frame that got an index.
        self.frames: list[frame_pb2.Frame] = []
        # What its manifest counts, had everything been taken.
        self.counted = 0
        self._world = world
        self._writer = writer
        self._line = line
        self._number = number
        self._message = 0
        self._text = ""
        self._tools = 0
        world.recorder.published(self.key, self.execution, self.frames)

    def __str__(self) -> str:
        return f"turn {self._number} (epoch {self.execution.epoch})"

    @property
    def refused(self) -> bool:
        """Whether its writer was told to stop."""
        return self._writer.refused.done()

    def append(self, event: event_pb2.Event) -> None:
        """Append one event."""
        try:
            future = self._writer.event(event)
        except CallError:
            return
        self._world.promise(self._world.recorder.sent(self.key, event, line=self._line), future)

    def say(self, pieces: int) -> None:
        """The next pieces of the message."""
        for piece in range(pieces):
            text = f"{len(self.frames)}.{piece} "
            if self._frame(self._entity, text_delta=frame_pb2.TextDelta(text=text)):
                self._text += text
        self._world.tell(f"{self} says to frame {len(self.frames) - 1}")

    def complete(self) -> None:
        """The message, whole."""
        body = event_pb2.MessageCompleted(
            message_id=self._entity,
            role=content_pb2.ROLE_AGENT,
            content=[content_pb2.ContentPart(text=content_pb2.TextPart(text=self._text))],
            finish_reason="end",
        )
        self.counted += 1
        self.append(event_pb2.Event(message_completed=body))
        self._world.tell(f"{self} completes {self._entity}")
        self._message += 1
        self._text = ""

    def use_tools(self, count: int) -> None:
        """Tool calls: begun in frames, told in one atomic set."""
        made = []
        for _ in range(count):
            self._tools += 1
            self._frame(f"{self._entity}-t{self._tools}", tool_started=frame_pb2.ToolStarted(name="ls"))
            made.append(tool_event(f"{self._entity}-t{self._tools}"))
        self.counted += count
        try:
            future = self._writer.atomic(made)
        except CallError:
            return
        recorder, request = self._world.recorder, self._world.recorder.request()
        sent = [recorder.sent(self.key, event, request=request, line=self._line) for event in made]
        self._world.promise_all(sent, future)
        self._world.tell(f"{self} used {count} tools")

    def end(self, *, with_last: bool) -> None:
        """The ending; nothing follows."""
        self.ended = True
        self._tools += 1
        before = [tool_event(f"{self._entity}-t{self._tools}")] if with_last else []
        event = event_pb2.Event(execution_completed=event_pb2.ExecutionCompleted(finish_reason="end_turn"))
        try:
            future = self._writer.ending(event, before=before)
        except CallError:
            return
        # What became of those before it is told to nobody; the log shows them.
        for earlier in before:
            self._world.recorder.sent(self.key, earlier, line=self._line)
        ending = self._world.recorder.sent(self.key, event, line=self._line)
        self._world.answered_with.update((earlier.event_id.lower(), ending) for earlier in before)
        self._world.promise(ending, future)
        self._world.tell(f"{self} ends")

    @property
    def _entity(self) -> str:
        return f"{self._number}-m{self._message}"

    def _frame(self, entity: str, **body: frame_pb2.TextDelta | frame_pb2.ToolStarted) -> bool:
        try:
            index = self._writer.frame(entity, **body)  # type: ignore[arg-type]
        except CallError:
            return False
        self.frames.append(frame_pb2.Frame(frame_index=index, entity_id=entity, **body))  # type: ignore[arg-type]
        return True


def tool_event(call_id: str) -> event_pb2.Event:
    """The end of a tool call."""
    body = event_pb2.ToolCompleted(
        tool_call_id=call_id, name="ls", kind="execute", input_json="{}", status=event_pb2.TOOL_STATUS_SUCCEEDED
    )
    return event_pb2.Event(tool_completed=body)


class Follower:
    """A reader that comes back by itself, each time to another relay, until it leaves or is refused."""

    def __init__(
        self,
        conversation: Conversation,
        reader: StrictReader,
        relays: list[grpc.aio.Channel],
        first: int,
        tick: Callable[[], int],
    ) -> None:
        self.conversation = conversation
        self.reader = reader
        self._tick = tick
        self.record = Reader(conversation.key, reader.recording)
        self._relays = relays
        self._next = first
        self._following: asyncio.Task[None] | None = None

    def come(self) -> None:
        """Follow from where it stands, if it does not yet."""
        if self._following is None or self._following.done():
            self._following = asyncio.create_task(self._follow(), name="follower")

    async def leave(self) -> None:
        """Go away, in the middle of whatever happens."""
        if self._following is not None:
            self._following.cancel()
            await asyncio.wait([self._following])
        await self.reader.disconnect()

    async def is_ready(self) -> None:
        """Return when its newest connection said `ready`."""
        await self._until(lambda: self.reader.ready)

    async def gets(self, execution_id: str) -> None:
        """Return when it got the ending of an execution, as far as it got anything of it."""
        await self._until(
            lambda: any(
                item.event.execution_id == execution_id and item.event.type.startswith("execution.completed")
                for item in self.reader.events
            )
        )

    @property
    def expired(self) -> bool:
        """Whether it was refused because what follows its cursor was removed."""
        over = self._following is not None and self._following.done()
        refusal = self.reader.recording[-1].refusal if over and self.reader.recording else None
        return refusal is not None and refusal.reason == "CURSOR_EXPIRED"

    async def catches_up(self, sequence: int) -> None:
        """Return when it has everything up to `sequence`; it then counts as caught up. Or when it never can."""
        await self._until(
            lambda: self.expired or (self.reader.cursor is not None and self.reader.cursor.sequence >= sequence)
        )
        self.record.caught_up = not self.expired

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            following = self._following
            assert following is not None
            if following.done():
                following.result()
                raise AssertionError(f"a reader was refused: {self.reader.error!r}")
            await asyncio.sleep(_PAUSE_SECONDS / 5)

    async def _follow(self) -> None:
        while True:
            self.reader.use(self._relays[self._next % len(self._relays)])
            self._next += 1
            began = self._tick()
            self.reader.connect()
            self.reader.recording[-1].began = began
            await self.reader.over()
            error = self.reader.error
            if error is None or error.code() not in _PASSING:
                return
            await asyncio.sleep(_PAUSE_SECONDS)
