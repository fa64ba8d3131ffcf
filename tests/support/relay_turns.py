"""A producer whose every step a test decides: frames with any index, events with any frames_through."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

import grpc.aio

from hearth.history.v1 import history_pb2, history_service_pb2, history_service_pb2_grpc
from hearth.relay.v1 import relay_pb2, relay_service_pb2, relay_service_pb2_grpc
from hearth.types.v1 import content_pb2, event_pb2, frame_pb2, session_pb2
from tests.support import events

STORED = frozenset({history_pb2.APPEND_OUTCOME_APPENDED, history_pb2.APPEND_OUTCOME_DUPLICATE})


def text_frame(index: int, entity_id: str, text: str) -> frame_pb2.Frame:
    """A piece of a message."""
    return frame_pb2.Frame(frame_index=index, entity_id=entity_id, text_delta=frame_pb2.TextDelta(text=text))


def tool_frame(index: int, entity_id: str, name: str = "ls") -> frame_pb2.Frame:
    """The begin of a tool call."""
    return frame_pb2.Frame(frame_index=index, entity_id=entity_id, tool_started=frame_pb2.ToolStarted(name=name))


async def append(
    history: grpc.aio.Channel, session: session_pb2.SessionKey, *new: event_pb2.Event
) -> list[history_pb2.AppendResult]:
    """Append events, each for itself."""
    stub = history_service_pb2_grpc.HistoryServiceStub(history)
    request = history_service_pb2.AppendEventsRequest(sets=[events.append_set(session, *new)])
    response = await stub.AppendEvents(request, timeout=20, wait_for_ready=True)
    return list(response.sets[0].results)


async def publish(relay: grpc.aio.Channel, *batches: relay_pb2.FrameBatch) -> list[relay_pb2.PublishResult]:
    """Publish batches in one request on a stream of its own."""
    stub = relay_service_pb2_grpc.RelayServiceStub(relay)

    async def requests() -> AsyncIterator[relay_service_pb2.PublishRequest]:
        yield relay_service_pb2.PublishRequest(number=1, batches=batches)

    call = stub.Publish(requests(), timeout=20, wait_for_ready=True)
    responses = [response async for response in call]
    assert [response.number for response in responses] == [1]
    return list(responses[0].results)


class Turn:
    """One execution at one epoch."""

    def __init__(
        self,
        history: grpc.aio.Channel,
        relay: grpc.aio.Channel,
        session: session_pb2.SessionKey,
        *,
        epoch: int = 1,
        execution_id: str = "",
    ) -> None:
        self._history = history
        self._relay = relay
        self.session = session
        self.run = events.Run(epoch, execution_id or events.new_id())
        self.next = 0
        self.texts: dict[str, str] = {}

    def again(self, epoch: int) -> Turn:
        """The same execution, driven at a higher epoch."""
        return Turn(self._history, self._relay, self.session, epoch=epoch, execution_id=self.run.execution_id)

    @property
    def through(self) -> int | None:
        """Highest index assigned so far."""
        return self.next - 1 if self.next else None

    def batch(self, frames: Sequence[frame_pb2.Frame] = (), *, ended: bool = False) -> relay_pb2.FrameBatch:
        """A batch of this execution."""
        return relay_pb2.FrameBatch(
            session=self.session,
            execution_id=self.run.execution_id,
            epoch=self.run.epoch,
            frames=frames,
            ended=ended,
        )

    def frames(self, entity_id: str, *texts: str) -> list[frame_pb2.Frame]:
        """The next frames of a message."""
        made = []
        for text in texts:
            made.append(text_frame(self.next, entity_id, text))
            self.texts[entity_id] = self.texts.get(entity_id, "") + text
            self.next += 1
        return made

    def lose(self, count: int) -> None:
        """Assign indexes to frames that are never sent."""
        self.next += count

    async def start(self) -> None:
        """Append `execution.started`."""
        await self.append(self.run.started())

    async def say(self, entity_id: str, *texts: str) -> None:
        """Publish the next frames of a message."""
        await self.publish(*self.frames(entity_id, *texts))

    async def begin_tool(self, entity_id: str, name: str = "ls") -> None:
        """Publish the begin of a tool call."""
        self.next += 1
        await self.publish(tool_frame(self.next - 1, entity_id, name))

    async def publish(self, *frames: frame_pb2.Frame) -> relay_pb2.PublishResult:
        """Publish frames; they must be taken."""
        (result,) = await publish(self._relay, self.batch(frames))
        assert result.outcome == relay_pb2.PUBLISH_OUTCOME_ACCEPTED, result
        return result

    async def complete(self, entity_id: str) -> int:
        """Append the message that the frames built up; its sequence."""
        message = event_pb2.MessageCompleted(
            message_id=entity_id,
            role=content_pb2.ROLE_AGENT,
            content=[content_pb2.ContentPart(text=content_pb2.TextPart(text=self.texts.get(entity_id, "")))],
            finish_reason="end",
        )
        event = self.run.message()
        event.entity_id = entity_id
        event.message_completed.CopyFrom(message)
        return await self.append(self.covering(event))

    async def complete_tool(self, entity_id: str) -> int:
        """Append the end of a tool call; its sequence."""
        event = self.run.tool()
        event.entity_id = event.tool_completed.tool_call_id = entity_id
        return await self.append(self.covering(event))

    async def end(self) -> int:
        """Append the ending, and say so to the relay; its sequence."""
        sequence = await self.append(self.covering(self.run.completed()))
        await publish(self._relay, self.batch(ended=True))
        return sequence

    def covering(self, event: event_pb2.Event) -> event_pb2.Event:
        """`event` with frames_through as of now."""
        if self.through is not None:
            event.frames_through = self.through
        return event

    async def append(self, *new: event_pb2.Event) -> int:
        """Append events; they must be stored. The sequence of the last one."""
        results = await append(self._history, self.session, *new)
        assert all(result.outcome in STORED for result in results), results
        return results[-1].sequence
