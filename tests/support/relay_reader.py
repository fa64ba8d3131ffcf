"""A strict reader of sessions: records all it gets over its connections, and has it checked at its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import grpc.aio

from hearth.relay.v1 import relay_pb2, relay_service_pb2, relay_service_pb2_grpc
from hearth.types.v1 import event_pb2, session_pb2
from services.chassis.errors import from_rpc_error
from tests.checkers import check_reader
from tests.support.recording import Connection, events_in, gap_range


class StrictReader:
    """Reads a session, records everything, and resumes by the cursor rule when told to or when the stream breaks.

    Use it by `reading`, which checks the recording at its end.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        session: session_pb2.SessionKey,
        *,
        after: session_pb2.Cursor | None = None,
        tail: bool = False,
        events_only: bool = False,
    ) -> None:
        self._stub = relay_service_pb2_grpc.RelayServiceStub(channel)
        self._session = session
        self._events_only = events_only
        self.cursor: session_pb2.Cursor | None = None if tail else after or session_pb2.Cursor()
        self.recording: list[Connection] = []
        self._errors: list[grpc.aio.AioRpcError | None] = []
        self._changed = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._taking = asyncio.Event()
        self._taking.set()

    # --- what it got, over all connections ---

    @property
    def items(self) -> list[relay_pb2.Item]:
        """Every item, in order."""
        return [item for connection in self.recording for item in connection.items]

    @property
    def events(self) -> list[event_pb2.EventItem]:
        """Every event."""
        return list(events_in(self.items))

    @property
    def sequences(self) -> list[int]:
        """Their sequences."""
        return [item.cursor.sequence for item in self.events]

    @property
    def types(self) -> list[str]:
        """Their types."""
        return [item.event.type for item in self.events]

    @property
    def frames(self) -> list[relay_pb2.FrameItem]:
        """Every frame."""
        return [item.frame for item in self.items if item.HasField("frame")]

    @property
    def gaps(self) -> list[tuple[int, int]]:
        """Every gap, first and last index."""
        return [gap_range(item.gap) for item in self.items if item.HasField("gap")]

    def kinds(self) -> list[str]:
        """What the items are, in order."""
        return [item.WhichOneof("item") or "" for item in self.items]

    def of_kind(self, kind: str) -> list[relay_pb2.Item]:
        """The items of one kind."""
        return [item for item in self.items if item.WhichOneof("item") == kind]

    def text(self, entity_id: str) -> str:
        """What the frames of an entity add up to."""
        return "".join(item.frame.text_delta.text for item in self.frames if item.frame.entity_id == entity_id)

    @property
    def error(self) -> grpc.aio.AioRpcError | None:
        """How the newest connection ended."""
        return self._errors[-1] if self._errors else None

    @property
    def ready(self) -> bool:
        """Whether the newest connection said `ready`."""
        return bool(self.recording) and any(item.HasField("ready") for item in self.recording[-1].items)

    @property
    def ended(self) -> bool:
        """Whether the newest connection is over."""
        return self._task is None or self._task.done()

    # --- what it does ---

    def use(self, channel: grpc.aio.Channel) -> None:
        """Connect to another relay from now on."""
        self._stub = relay_service_pb2_grpc.RelayServiceStub(channel)

    def connect(self) -> None:
        """Open a connection at the cursor."""
        assert self.ended, "still connected"
        request = relay_service_pb2.SubscribeRequest(session=self._session, events_only=self._events_only)
        if self.cursor is None:
            request.tail = True
        else:
            request.after.CopyFrom(self.cursor)
        connection = Connection(request.after if self.cursor is not None else None, events_only=self._events_only)
        self.recording.append(connection)
        self._errors.append(None)
        self._task = asyncio.create_task(self._read(connection, request))

    async def disconnect(self) -> None:
        """Leave in the middle."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def reconnect(self) -> None:
        """Leave and come back at the cursor."""
        await self.disconnect()
        self.connect()

    def pause(self) -> None:
        """Take nothing more, but stay connected."""
        self._taking.clear()

    def go_on(self) -> None:
        """Take again."""
        self._taking.set()

    async def until(self, condition: Callable[[], object], timeout: float = 15.0) -> None:
        """Return when `condition` holds; AssertionError when it does not in time or the connection ends before."""
        try:
            async with asyncio.timeout(timeout):
                while not condition():
                    assert not self.ended, f"the stream ended: {self.error!r}\n{self._story()}"
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"not within {timeout} s:\n{self._story()}") from None

    async def until_ready(self) -> None:
        """Return when `ready` came."""
        await self.until(lambda: self.ready)

    async def until_sequence(self, sequence: int, timeout: float = 15.0) -> None:
        """Return when the event at `sequence` came."""
        await self.until(lambda: any(found >= sequence for found in self.sequences[-1:]), timeout)

    async def until_text(self, entity_id: str, text: str) -> None:
        """Return when the frames of an entity add up to `text`."""
        await self.until(lambda: self.text(entity_id) == text)

    async def until_type(self, event_type: str) -> None:
        """Return when an event of this type came."""
        await self.until(lambda: event_type in self.types)

    async def until_ended_or(self, event_type: str, timeout: float = 30.0) -> None:
        """Return when the connection is over or an event of this type came."""
        async with asyncio.timeout(timeout):
            while not self.ended and event_type not in self.types:
                self._changed.clear()
                await self._changed.wait()

    async def until_ended_or_sequence(self, sequence: int, timeout: float = 30.0) -> None:
        """Return when the connection is over or the event at `sequence` came."""
        async with asyncio.timeout(timeout):
            while not self.ended and (not self.sequences or self.sequences[-1] < sequence):
                self._changed.clear()
                await self._changed.wait()

    async def over(self) -> None:
        """Return when the connection is over, whenever that is."""
        assert self._task is not None
        await asyncio.wait([self._task])

    async def until_ended(self, timeout: float = 15.0) -> None:
        """Return when the connection is over."""
        assert self._task is not None
        done, _ = await asyncio.wait([self._task], timeout=timeout)
        assert done, f"the stream did not end within {timeout} s:\n{self._story()}"

    def verify(self) -> None:
        """Check everything it got."""
        check_reader(self.recording)

    async def _read(self, connection: Connection, request: relay_service_pb2.SubscribeRequest) -> None:
        call = self._stub.Subscribe(request)
        try:
            async for response in call:
                for item in response.items:
                    connection.items.append(item)
                    if item.HasField("event"):
                        self.cursor = item.event.cursor
                    elif item.HasField("ready") and self.cursor is None:
                        self.cursor = item.ready.cursor
                self._changed.set()
                await self._taking.wait()
        except grpc.aio.AioRpcError as error:
            connection.refusal = from_rpc_error(error)
            self._errors[-1] = error
        finally:
            call.cancel()
            # Seen only once this task is done.
            asyncio.get_running_loop().call_soon(self._changed.set)

    def _story(self) -> str:
        lines = [str(item).replace("\n", " ")[:160] for item in self.items]
        return "\n".join(lines[-40:])


@asynccontextmanager
async def reading(
    channel: grpc.aio.Channel,
    session: session_pb2.SessionKey,
    *,
    after: session_pb2.Cursor | None = None,
    tail: bool = False,
    events_only: bool = False,
) -> AsyncIterator[StrictReader]:
    """A connected strict reader; what it got is checked when the block ends well."""
    reader = StrictReader(channel, session, after=after, tail=tail, events_only=events_only)
    reader.connect()
    try:
        yield reader
    finally:
        await reader.disconnect()
    reader.verify()
