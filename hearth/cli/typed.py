"""Lines of stdin, read beside everything else."""

from __future__ import annotations

import asyncio
import codecs
import collections
import contextlib
import os
import sys
import threading
from collections.abc import Callable

_CHUNK = 65536


class Typed:
    """Lines in the order in which they came. `by_hand`: from a terminal. `ended`: all were taken, no more will come.

    They are read in a thread of the lowest level: one that waits inside of `sys.stdin` would keep the program from
    ending, and a terminal that does not block would be one for stdout as well.
    """

    def __init__(self) -> None:
        self.by_hand = sys.stdin.isatty()
        self._lines: collections.deque[str] = collections.deque()
        self._closed = False

    def start(self, loop: asyncio.AbstractEventLoop, changed: Callable[[], None]) -> None:
        """Read from now on; `changed` is called in the loop when there is something new."""

        def arrived(fresh: list[str], closed: bool) -> None:
            self._lines += fresh
            self._closed = closed
            changed()

        def read() -> None:
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            rest = ""
            # The loop may be gone by the time somebody types again.
            with contextlib.suppress(RuntimeError, OSError):
                while chunk := os.read(sys.stdin.fileno(), _CHUNK):
                    *fresh, rest = (rest + decoder.decode(chunk)).split("\n")
                    loop.call_soon_threadsafe(arrived, [line.strip() for line in fresh], False)
                last = (rest + decoder.decode(b"", final=True)).strip()
                loop.call_soon_threadsafe(arrived, [last] if last else [], True)

        threading.Thread(target=read, name="stdin", daemon=True).start()

    @property
    def first(self) -> str | None:
        """The next line; None when there is none yet."""
        return self._lines[0] if self._lines else None

    @property
    def ended(self) -> bool:
        """Whether nothing comes any more."""
        return self._closed and not self._lines

    def take(self) -> str:
        """The next line, which there must be."""
        return self._lines.popleft()
