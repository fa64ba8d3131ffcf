"""Loopback addresses, one per sandbox, that no other stand-in on this machine gives out."""

from __future__ import annotations

import random
import socket
from collections import deque

# Who holds this port at .254 of a block of 256 addresses owns the block.
_GUARD_PORT = 51789
_LAST = 254


class Addresses:
    """Gives out addresses of blocks of 127.0.0.0/8 that it reserved; an address returned is the last to be reused."""

    def __init__(self) -> None:
        self._guards: list[socket.socket] = []
        self._free: deque[str] = deque()
        self._random = random.Random()

    def take(self) -> str:
        """An address that nobody else has."""
        if not self._free:
            self._reserve()
        return self._free.popleft()

    def give_back(self, address: str) -> None:
        """Return one."""
        self._free.append(address)

    def close(self) -> None:
        """Let go of all blocks."""
        for guard in self._guards:
            guard.close()

    def _reserve(self) -> None:
        while True:
            block = f"127.{self._random.randrange(16, 255)}.{self._random.randrange(256)}"
            guard = socket.socket()
            try:
                guard.bind((f"{block}.{_LAST}", _GUARD_PORT))
                guard.listen(1)
            except OSError:
                guard.close()
                continue
            self._guards.append(guard)
            self._free.extend(f"{block}.{number}" for number in range(1, _LAST))
            return
