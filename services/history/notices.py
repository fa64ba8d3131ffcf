"""What history says on the bus after a commit: a hint for relays, never the truth.

Notices wait in a bounded queue outside of the commit path. While one batch is on its way, the next gathers, and what a
session commits in that time becomes one notice. A notice that is dropped, because the bus is away or slow, costs its
readers the time until a relay compares heads, and nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from opentelemetry.instrumentation.utils import suppress_instrumentation
from redis.exceptions import RedisError

from services.chassis.settings import StartupError, ValkeySettings
from services.chassis.valkey import create_client
from services.history import spans, wire
from services.history.ledger import Record
from services.history.validate import Key

if TYPE_CHECKING:
    from redis.asyncio import Redis

logger = logging.getLogger(__name__)

MAX_INLINE_BYTES = 64 * 1024
_MAX_QUEUE_BYTES = 16 * 1024 * 1024
_MAX_QUEUE_NOTICES = 10_000
_MAX_BATCH_BYTES = 1024 * 1024
_MAX_BATCH_NOTICES = 256
# What a notice costs in memory beside its events.
_OVERHEAD = 512
_BACKOFF_FIRST_SECONDS = 0.1
_BACKOFF_MAX_SECONDS = 2.0
# Many PUBLISH in one command: a command costs its client a hundred times what the server spends on it.
_PUBLISH_ALL = "for place = 1, #ARGV, 2 do redis.call('PUBLISH', ARGV[place], ARGV[place + 1]) end"


def channel(key: Key) -> bytes:
    """Where notices and frames of a session are published."""
    return f"hearth:live:{key[0]}/{key[1]}".encode()


@dataclass(slots=True)
class _Notice:
    """Neighbouring sequences of one log. `items` is None when they are too large to be carried along."""

    log_id: str
    first: int
    last: int
    previous_tag: str
    traceparent: str
    items: list[bytes] | None = field(default_factory=list)
    size: int = 0

    def join(self, later: _Notice) -> bool:
        """Take over a notice of the sequences that follow; False when it must stay one of its own."""
        if later.log_id != self.log_id or later.first != self.last + 1:
            return False
        if (self.items is None) != (later.items is None) or self.size + later.size > MAX_INLINE_BYTES:
            return False
        self.last = later.last
        self.size += later.size
        if self.items is not None and later.items is not None:
            self.items += later.items
        return True

    def payload(self) -> bytes:
        """What is published."""
        made = wire.notice(
            self.log_id,
            self.first,
            self.last,
            previous_tag=self.previous_tag,
            items=self.items or (),
            traceparent=self.traceparent,
        )
        return b"E" + made


class Message(NamedTuple):
    """What is published, and where. `traceparent` is that of the commit which it tells of."""

    channel: bytes
    payload: bytes
    traceparent: str


class NoticeQueue:
    """Notices that wait, oldest session first; pure, but for its memory."""

    def __init__(self, *, max_bytes: int = _MAX_QUEUE_BYTES, max_notices: int = _MAX_QUEUE_NOTICES) -> None:
        self._max_bytes = max_bytes
        self._max_notices = max_notices
        self._waiting: OrderedDict[Key, list[_Notice]] = OrderedDict()
        self._count = 0
        self._bytes = 0
        self.dropped = 0

    def __len__(self) -> int:
        return self._count

    def add(
        self, key: Key, log_id: str, previous_id: str, events: Iterable[tuple[int, Record]], traceparent: str
    ) -> None:
        """Queue what was committed; joins what waits already for this session where it fits."""
        writer = wire.ItemWriter(log_id)
        for sequence, record in events:
            item = writer.item(record.raw, sequence, record.event_id)
            notice = _Notice(log_id, sequence, sequence, wire.tag(previous_id), traceparent)
            if len(item) > MAX_INLINE_BYTES:
                notice.items = None
            else:
                notice.items, notice.size = [item], len(item)
            self._put(key, notice)
            previous_id = record.event_id

    def take(self) -> list[Message]:
        """The next batch, in order for each session; empty when nothing waits."""
        batch: list[Message] = []
        size = 0
        while self._waiting and len(batch) < _MAX_BATCH_NOTICES and size < _MAX_BATCH_BYTES:
            key, notices = next(iter(self._waiting.items()))
            notice = notices.pop(0)
            if not notices:
                del self._waiting[key]
            self._count -= 1
            self._bytes -= notice.size + _OVERHEAD
            size += notice.size
            batch.append(Message(channel(key), notice.payload(), notice.traceparent))
        return batch

    def clear(self) -> None:
        """Forget everything."""
        self.dropped += self._count
        self._waiting.clear()
        self._count = self._bytes = 0

    def _put(self, key: Key, notice: _Notice) -> None:
        notices = self._waiting.setdefault(key, [])
        self._bytes += notice.size
        if not notices or not notices[-1].join(notice):
            notices.append(notice)
            self._count += 1
            self._bytes += _OVERHEAD
        while self._count > self._max_notices or self._bytes > self._max_bytes:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        key, notices = next(iter(self._waiting.items()))
        notice = notices.pop(0)
        if not notices:
            del self._waiting[key]
        self._count -= 1
        self._bytes -= notice.size + _OVERHEAD
        self.dropped += 1


class Publisher:
    """Sends what waits, for as long as the process lives."""

    def __init__(self, settings: ValkeySettings) -> None:
        self._settings = settings
        self._queue = NoticeQueue()
        self._filled = asyncio.Event()

    def committed(
        self, key: Key, log_id: str, previous_id: str, events: Sequence[tuple[int, Record]], traceparent: str
    ) -> None:
        """Queue a notice of `events` (sequence, record); `previous_id` is the id of the event before them."""
        self._queue.add(key, log_id, previous_id, events, traceparent)
        self._filled.set()

    @property
    def waiting(self) -> int:
        """Notices that are to be sent."""
        return len(self._queue)

    @property
    def dropped(self) -> int:
        """Notices that were never sent."""
        return self._queue.dropped

    async def run(self) -> None:
        """Publish for ever; while the bus is away, what is committed is dropped."""
        pause = _BACKOFF_FIRST_SECONDS
        while True:
            try:
                client = await self._connect()
            except StartupError as error:
                logger.warning("bus is away, notices are dropped", extra={"cause": str(error)})
            else:
                pause = _BACKOFF_FIRST_SECONDS
                try:
                    await self._publish(client)
                finally:
                    await client.aclose()
            await asyncio.sleep(pause)
            pause = min(pause * 2, _BACKOFF_MAX_SECONDS)
            self._queue.clear()

    async def _connect(self) -> Redis:
        """A client whose server answered just now. Raises `StartupError`."""
        settings = self._settings.model_copy(update={"valkey_start_timeout": 0.0})
        return await create_client(settings, size=1)

    async def _publish(self, client: Redis) -> None:
        """Publish until the bus does not answer."""
        script = client.register_script(_PUBLISH_ALL)
        try:
            await client.script_load(_PUBLISH_ALL)
        except (RedisError, OSError) as error:
            logger.warning("bus is away, notices are dropped", extra={"cause": type(error).__name__})
            return
        logger.info("publishing notices", extra={"dropped": self._queue.dropped})
        while True:
            await self._filled.wait()
            batch = self._queue.take()
            if not batch:
                self._filled.clear()
                continue
            try:
                # The command has no span beside: it is the same thing again.
                with spans.sending([message.traceparent for message in batch]), suppress_instrumentation():
                    await script(args=[part for message in batch for part in message[:2]])
            except (RedisError, OSError) as error:
                logger.warning("bus is away, notices are dropped", extra={"cause": type(error).__name__})
                return
