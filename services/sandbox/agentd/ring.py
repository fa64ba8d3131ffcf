"""The messages of one agent server, numbered and bounded in bytes, for any number of readers.

A reader keeps only its own position. It never holds back the writer: what was pushed out before a reader came to it is
gone, and the reader sees that the next number is not the one after its last.
"""

import asyncio

RING_BYTES = 16 * 1024 * 1024


class Ring:
    """Messages numbered 1, 2, 3 …; the oldest go when together they exceed `limit` bytes. The newest always stays."""

    def __init__(self, limit: int = RING_BYTES) -> None:
        self._limit = limit
        self._messages: list[bytes | None] = []
        self._gone = 0  # leading slots of the list whose message was dropped
        self._base = 0  # number of the message before the list's first slot
        self._size = 0
        self._closed = False
        self._changed: asyncio.Future[None] | None = None

    @property
    def newest(self) -> int:
        """Number of the newest message; 0 when there was none."""
        return self._base + len(self._messages)

    @property
    def oldest(self) -> int:
        """Number of the oldest message that is still here; `newest + 1` when there is none."""
        return self._base + self._gone + 1

    @property
    def size(self) -> int:
        """Bytes of the messages held."""
        return self._size

    @property
    def closed(self) -> bool:
        """True when no message will follow."""
        return self._closed

    def append(self, message: bytes) -> int:
        """Add a message and return its number. Raises RuntimeError after close."""
        if self._closed:
            raise RuntimeError("the ring is closed")
        self._messages.append(message)
        self._size += len(message)
        while self._size > self._limit and self._gone < len(self._messages) - 1:
            dropped = self._messages[self._gone]
            assert dropped is not None
            self._messages[self._gone] = None
            self._gone += 1
            self._size -= len(dropped)
        # Compacting only when half of the list is dead keeps both this and the look-up by number at constant cost.
        if self._gone > 64 and self._gone * 2 > len(self._messages):
            del self._messages[: self._gone]
            self._base += self._gone
            self._gone = 0
        self._wake()
        return self.newest

    def after(self, number: int, max_bytes: int = 256 * 1024) -> list[tuple[int, bytes]]:
        """The messages that follow `number` and are still here, in order: at least one if there is any, then as many
        as fit `max_bytes`."""
        batch: list[tuple[int, bytes]] = []
        size = 0
        for at in range(max(number, self.oldest - 1) - self._base, len(self._messages)):
            message = self._messages[at]
            assert message is not None
            if batch and size + len(message) > max_bytes:
                break
            batch.append((self._base + at + 1, message))
            size += len(message)
        return batch

    def close(self) -> None:
        """No message will follow; what is here can still be read."""
        self._closed = True
        self._wake()

    async def wait(self, number: int, timeout: float) -> bool:
        """Wait for a message after `number`, or the close; False when `timeout` seconds passed first."""
        deadline = asyncio.get_running_loop().time() + timeout
        while self.newest <= number and not self._closed:
            remaining = deadline - asyncio.get_running_loop().time()
            if remaining <= 0:
                return False
            if self._changed is None:
                self._changed = asyncio.get_running_loop().create_future()
            # asyncio.wait leaves the shared future alone when one of its waiters is cancelled or runs out of time.
            await asyncio.wait([self._changed], timeout=remaining)
        return True

    def _wake(self) -> None:
        if self._changed is not None:
            self._changed.set_result(None)
            self._changed = None
