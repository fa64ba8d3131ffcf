"""How the allocator of the C library treats a service: memory that was needed once is given back.

Left to itself, glibc keeps the room of a large message for the next one, in as many heaps as threads have met, and what
outlives the message keeps that room from ever being returned: hostile or merely large requests would leave a process at
the size of its worst moments, and slowly beyond.
"""

from __future__ import annotations

import ctypes
import sys

# Of `malloc.h`; a limit that is set stays as it is, where glibc would raise it with each large block.
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8
# What is smaller is used again faster than the system would give it anew; the chunks of a stream are.
_LARGE_BYTES = 1024 * 1024
_SPARE_BYTES = 4 * 1024 * 1024
_HEAPS = 2


def give_back() -> None:
    """Have large blocks returned at once, and free room at the end of a heap. Nothing happens without glibc."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for option, value in ((_MMAP_THRESHOLD, _LARGE_BYTES), (_TRIM_THRESHOLD, _SPARE_BYTES), (_ARENA_MAX, _HEAPS)):
        mallopt(option, value)
