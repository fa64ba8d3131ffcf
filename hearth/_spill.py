"""What waits for the history beyond the memory it may take: kept in a file without a name, read back in its order.

Each execution has a file of its own, made when it is first needed and gone with its last block, so nothing is left
behind by a process that ends in whichever way. All files are written and read by one thread; the event loop never
waits for a disk for longer than a moment.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
import enum
import logging
import os
import tempfile
import weakref
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextvars import Context
from typing import Any, TypeVar

import grpc

from hearth._appending import Item, Parked
from hearth.errors import CallError

logger = logging.getLogger(__name__)

# Records are written and read back by so many bytes, or one by one where they are larger.
BLOCK_BYTES = 256 * 1024
# How much may be on its way to the disk, and how long the event loop waits when that is not enough.
UNWRITTEN_BYTES = 8 * 1024 * 1024
PATIENCE_SECONDS = 0.05

_T = TypeVar("_T")


class SpillRefused(Exception):
    """No room: the limit is reached, or the disk is full, broken or too slow. The message says which."""


class Promise(asyncio.Future[Any]):
    """The result of something parked. It is kept by who asked for it, or for its callbacks until they are called."""

    def __init__(self, pinned: set[Promise]) -> None:
        super().__init__()
        self._pinned: set[Promise] | None = pinned

    def add_done_callback(self, fn: Callable[[Any], object], /, *, context: Context | None = None) -> None:
        """As that of every future."""
        super().add_done_callback(fn, context=context)
        if self._pinned is not None and not self.done():
            self._pinned.add(self)

    def unpin(self) -> None:
        """Somebody else keeps it from now on."""
        if self._pinned is not None:
            self._pinned.discard(self)
            self._pinned = None


class Extents:
    """Which parts of a file are taken: ascending, without overlap."""

    def __init__(self) -> None:
        self._taken: list[tuple[int, int]] = []

    def __bool__(self) -> bool:
        return bool(self._taken)

    def take(self, length: int) -> int:
        """The lowest offset at which so many bytes are free; they are taken now."""
        at = 0
        for offset, taken in self._taken:
            if offset - at >= length:
                break
            at = offset + taken
        bisect.insort(self._taken, (at, length))
        return at

    def free(self, offset: int) -> None:
        """Give back what was taken at an offset."""
        del self._taken[bisect.bisect_left(self._taken, (offset, 0))]


class NamelessFile:
    """A file that only this process can reach, and only as long as it runs. For one thread at a time."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._descriptor = -1

    def write(self, offset: int, content: bytes) -> None:
        """Write all of it; makes the file if there is none. Raises OSError."""
        if self._descriptor < 0:
            self._descriptor = _open_nameless(self._directory)
        rest = memoryview(content)
        while rest:
            written = os.pwrite(self._descriptor, rest, offset)
            rest, offset = rest[written:], offset + written

    def read(self, offset: int, length: int) -> bytes:
        """So many bytes. Raises OSError when they are not there."""
        parts: list[bytes] = []
        while length:
            part = os.pread(self._descriptor, length, offset)
            if not part:
                raise OSError("the file is shorter than what was written to it")
            parts.append(part)
            length, offset = length - len(part), offset + len(part)
        return b"".join(parts)

    def close(self) -> None:
        """Give the disk its room back. The next write makes another file."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


def _open_nameless(directory: str) -> int:
    nameless = getattr(os, "O_TMPFILE", 0)
    if nameless:
        # Not every file system has it, and which error those give differs between them.
        with contextlib.suppress(OSError):
            return os.open(directory, nameless | os.O_RDWR | os.O_CLOEXEC, 0o600)
    descriptor, path = tempfile.mkstemp(prefix="hearth-spill-", dir=directory)
    os.unlink(path)
    return descriptor


def default_directory() -> str:
    """Where temporary files go that may be large: `/tmp` is often memory, `/var/tmp` is not."""
    named = os.environ.get("TMPDIR", "")
    usual = "/var/tmp"  # noqa: S108 - files in it have no name
    return usual if not named and os.access(usual, os.W_OK | os.X_OK) else tempfile.gettempdir()


class Room:
    """The directory of all spill files of a process, and the thread that works on them."""

    def __init__(self, directory: str = "") -> None:
        """`directory` empty: the one for large temporary files."""
        self._directory = directory
        self._thread: ThreadPoolExecutor | None = None
        self.spills: weakref.WeakSet[Spill] = weakref.WeakSet()

    def file(self) -> NamelessFile:
        """A file, not made yet."""
        return NamelessFile(self._directory or default_directory())

    def submit(self, work: Callable[..., _T], *args: object, then: Callable[[Future[_T]], None]) -> Future[_T]:
        """Do `work` in the thread, behind what was given before; `then` is called in the event loop."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "producer spill")
        loop = asyncio.get_running_loop()

        def done(future: Future[_T]) -> None:
            # A loop that is closed already has nobody left who waits.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(then, future)

        future = self._thread.submit(work, *args)
        future.add_done_callback(done)
        return future

    def close(self) -> None:
        """Take no more work; what was given is still done."""
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    @property
    def bytes(self) -> int:
        """How much is parked now."""
        return sum(spill.bytes for spill in self.spills)


class Spill:
    """What one execution has parked.

    `unpack` makes items of records, with one future (or None) for each of them. `room_for` says whether so many bytes
    may come back into memory. `arrived` is called when a block was read. `broken` is called, with words, when no more
    can be parked. `lost` is called with how many events of the manifest will never be sent.
    """

    def __init__(
        self,
        room: Room,
        *,
        owner: object,
        limit: int,
        unpack: Callable[[bytes, list[Promise | None]], list[Item]],
        room_for: Callable[[int], bool],
        arrived: Callable[[], None],
        broken: Callable[[str], None],
        lost: Callable[[int], None],
    ) -> None:
        self._room = room
        self._limit = limit
        self._file = room.file()
        self._extents = Extents()
        self._number = 0
        self._promises: weakref.WeakValueDictionary[int, Promise] = weakref.WeakValueDictionary()
        self._pinned: set[Promise] = set()
        self._filling: Block | None = None
        self._writing: deque[tuple[Future[None], Block]] = deque()
        self._refusal = ""
        self.owner = owner
        self.unpack = unpack
        self.room_for = room_for
        self.arrived = arrived
        self.broken = broken
        self.lost = lost
        self.bytes = 0
        self.unwritten = 0
        room.spills.add(self)

    def put(self, record: bytes, counted: int) -> tuple[Promise, Block | None]:
        """Park a record: its future, and the block that it begins, which then has to be put into the line.

        Raises `SpillRefused`, and has not taken it then.
        """
        if self._refusal:
            raise SpillRefused(self._refusal)
        if self.bytes + len(record) > self._limit:
            raise SpillRefused("too much waits for the history")
        self._make_way(len(record))
        begun = None
        block = self._filling
        if block is None:
            block = begun = self._filling = Block(self, self._number)
        promise = self._promises[self._number] = Promise(self._pinned)
        self._number += 1
        self.bytes += len(record)
        self.unwritten += len(record)
        block.add(record, counted)
        if block.size >= BLOCK_BYTES:
            block.close()
        return promise, begun

    def _make_way(self, size: int) -> None:
        self._reap()
        if self.unwritten + size > UNWRITTEN_BYTES and self._writing:
            # The producer is faster than the thread gets to run: a moment of its time is less than a lost turn.
            wait([self._writing[0][0]], timeout=PATIENCE_SECONDS)
            self._reap()
        if self._refusal:
            raise SpillRefused(self._refusal)
        if self.unwritten + size > UNWRITTEN_BYTES:
            raise SpillRefused("the disk for what waits for the history does not keep up")

    # For blocks

    def filled(self, block: Block) -> None:
        """No more goes into a block."""
        if self._filling is block:
            self._filling = None

    def write(self, block: Block, content: bytes) -> int | None:
        """Write a block, in a while; its offset. None when it has to stay in memory."""
        if self._refusal:
            return None
        offset = self._extents.take(len(content))
        written = self._room.submit(self._file.write, offset, content, then=lambda _: self._reap())
        self._writing.append((written, block))
        return offset

    def read(self, offset: int, length: int, then: Callable[[Future[bytes]], None]) -> None:
        """Read a block that was written."""
        self._room.submit(self._file.read, offset, length, then=then)

    def gone(self, block: Block) -> None:
        """A block is parked no more."""
        self.bytes -= block.size
        if block.in_memory:
            self.unwritten -= block.size
        if block.offset is not None:
            self._extents.free(block.offset)
            if not self._extents:
                # Behind what is being written or read, in the same thread.
                self._room.submit(self._file.close, then=_nothing)

    def promises(self, first: int, count: int) -> list[Promise | None]:
        """The futures of records that are still wanted by somebody."""
        found = [self._promises.pop(number, None) for number in range(first, first + count)]
        for promise in found:
            if promise is not None:
                promise.unpin()
        return found

    def _reap(self) -> None:
        while self._writing and self._writing[0][0].done():
            future, block = self._writing.popleft()
            error = future.exception()
            if error is None:
                if block.written():
                    self.unwritten -= block.size
                continue
            # What could not be written stays in memory and is sent from there; what comes later finds no room.
            logger.error("what waits for the history cannot be written to the disk", exc_info=error)
            if not self._refusal:
                self._refusal = f"what waits for the history cannot be written to the disk: {_words(error)}"
                asyncio.get_running_loop().call_soon(self.broken, self._refusal)


class _State(enum.Enum):
    MEMORY = enum.auto()
    FILE = enum.auto()
    READING = enum.auto()
    LOST = enum.auto()
    GONE = enum.auto()


class Block(Parked):
    """Records that go to the file together."""

    __slots__ = (
        "_checksum",
        "_content",
        "_count",
        "_counted",
        "_first",
        "_records",
        "_spill",
        "_state",
        "offset",
        "size",
    )

    def __init__(self, spill: Spill, first: int) -> None:
        super().__init__(spill.owner)
        self._spill = spill
        self._first = first
        self._records: list[bytes] = []
        self._count = 0
        self._counted = 0
        self._content: bytes | None = None
        self._checksum = 0
        self._state = _State.MEMORY
        self.size = 0
        self.offset: int | None = None

    @property
    def in_memory(self) -> bool:
        """Whether it still counts as unwritten."""
        return self._state is _State.MEMORY

    def add(self, record: bytes, counted: int) -> None:
        """Put a record behind the others."""
        self._records.append(record)
        self._count += 1
        self._counted += counted
        self.size += len(record)

    def close(self) -> None:
        if not self._records:
            return
        self._spill.filled(self)
        self._content = b"".join(self._records)
        self._records = []
        self._checksum = zlib.crc32(self._content)
        self.offset = self._spill.write(self, self._content)

    def written(self) -> bool:
        """It is in the file: the memory is free. False when it is not needed there any more."""
        if self._state is not _State.MEMORY:
            return False
        self._state = _State.FILE
        self._content = None
        return True

    def take(self, *, next_up: bool) -> list[Item] | None:
        if self._state is _State.LOST:
            self.fail(CallError(grpc.StatusCode.DATA_LOSS, "what waited on the disk could not be read back"))
            return []
        if not next_up and not self._spill.room_for(self.size):
            return None
        if self._state is _State.MEMORY:
            return self._unpack(self._content or b"".join(self._records))
        if self._state is _State.READING:
            return None if self._content is None else self._unpack(self._content)
        assert self.offset is not None
        self._state = _State.READING
        self._spill.read(self.offset, self.size, self._arrived)
        return None

    def fail(self, error: Exception) -> None:
        self._leave()
        self._spill.lost(self._counted)
        for promise in self._spill.promises(self._first, self._count):
            if promise is not None and not promise.done():
                promise.set_exception(error)
                promise.exception()

    def _unpack(self, content: bytes) -> list[Item]:
        self._leave()
        return self._spill.unpack(content, self._spill.promises(self._first, self._count))

    def _leave(self) -> None:
        self._spill.filled(self)
        self._spill.gone(self)
        self._state = _State.GONE

    def _arrived(self, read: Future[bytes]) -> None:
        if self._state is _State.GONE:
            return
        error = read.exception()
        if error is None and zlib.crc32(read.result()) == self._checksum:
            self._content = read.result()
        else:
            self._state = _State.LOST
            logger.error("what waited on the disk could not be read back", exc_info=error)
            self._spill.broken("what waited on the disk could not be read back")
        self._spill.arrived()


def _words(error: BaseException) -> str:
    return error.strerror or str(error) if isinstance(error, OSError) else type(error).__name__


def _nothing(_: object) -> None:
    return
