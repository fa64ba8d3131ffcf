"""How the allocator of the C library treats a service: memory that was needed once is given back.

Left to itself, glibc keeps the room of a large message for the next one, in as many heaps as threads have met, and what
outlives the message keeps that room from ever being returned: hostile or merely large requests would leave a process at
the size of its worst moments, and slowly beyond.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import resource
import sys
from pathlib import Path
from typing import Any

# How often to look whether a process has grown.
LOOK_SECONDS = 10.0

# Of `malloc.h`; a limit that is set stays as it is, where glibc would raise it with each large block.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
# What is smaller is used again faster than the system would give it anew; the chunks of a stream are.
_LARGE_BYTES = 1024 * 1024
_SPARE_BYTES = 4 * 1024 * 1024
_HEAPS = 2
# Returning what is free within heaps holds up whoever allocates, the longer the more it is: not for less than this.
_GROWN_BYTES = 2 * 1024 * 1024
_STATM = Path("/proc/self/statm")


def give_back() -> None:
    """Have large blocks returned at once, and free room at the end of a heap. Nothing happens without glibc."""
    mallopt = _of_glibc("mallopt")
    if mallopt is None:
        return
    for option, value in ((_MMAP_THRESHOLD, _LARGE_BYTES), (_TRIM_THRESHOLD, _SPARE_BYTES), (_ARENA_MAX, _HEAPS)):
        mallopt(option, value)


class Spare:
    """What is free in the middle of heaps, between what is in use. Nothing happens without glibc."""

    def __init__(self) -> None:
        self._trim = _of_glibc("malloc_trim")
        self._least = _resident() if self._trim is not None else 0

    async def look(self) -> None:
        """Return it when the process is larger than it was at its least by what is worth it."""
        if self._trim is None:
            return
        now = _resident()
        if now < self._least + _GROWN_BYTES:
            self._least = min(self._least, now)
            return
        # Refused calls leave small cycles that hold large requests; left alone, they go by their number only.
        gc.collect(0)
        await asyncio.to_thread(self._trim, 0)
        # What stays is in use.
        self._least = _resident()


def _of_glibc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def _resident() -> int:
    """Bytes of this process that are in memory."""
    return int(_STATM.read_text().split()[1]) * resource.getpagesize()
