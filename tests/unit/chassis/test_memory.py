"""What a process needed for large messages is given back, whatever outlives them."""

from __future__ import annotations

import subprocess
import sys

import pytest

_GROWTH = """
import sys, psutil
from services.chassis.memory import give_back

def size():
    return psutil.Process().memory_info().rss / 2**20

if sys.argv[1] == "give back":
    give_back()
for large in (1, 4, 16, 31):
    bytearray(large * 2**20)
before = size()
kept = []
for _ in range(10):
    messages = [bytearray(2_000_000) for _ in range(10)]
    kept.append(bytearray(400))
    del messages
    kept += [bytearray(300) for _ in range(1000)]
print(size() - before)
"""


_HOLES = """
import asyncio, psutil
from services.chassis.memory import Spare

def size():
    return psutil.Process().memory_info().rss / 2**20

async def main():
    spare = Spare()
    before = size()
    many = [bytearray(50_000) for _ in range(1000)]
    # One of ten stays: every hole is far from the end of the heap.
    del many[::10]
    many = many[::9]
    grown = size()
    await spare.look()
    print(grown - before, size() - before)

asyncio.run(main())
"""


_CYCLES = """
import asyncio, gc, psutil
from services.chassis.memory import Spare

def size():
    return psutil.Process().memory_info().rss / 2**20

class Call:
    def __init__(self):
        self.call = self
        self.request = bytearray(100_000)

async def main():
    gc.collect()
    gc.set_threshold(1_000_000)
    spare = Spare()
    before = size()
    for _ in range(500):
        Call()
    grown = size()
    await spare.look()
    print(grown - before, size() - before)

asyncio.run(main())
"""


def printed(program: str, *arguments: str) -> list[float]:
    """The numbers that a program prints in a process of its own."""
    ran = subprocess.run([sys.executable, "-c", program, *arguments], check=True, capture_output=True, text=True)
    return [float(number) for number in ran.stdout.split()]


def growth(how: str) -> float:
    """MiB that a process keeps of 20 MB of messages."""
    (grown,) = printed(_GROWTH, how)
    return grown


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc is told")
def test_large_messages_leave_nothing() -> None:
    assert growth("keep") > 15
    assert growth("give back") < 10


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc is told")
@pytest.mark.parametrize("program", [_HOLES, _CYCLES])
def test_holes_between_what_is_in_use_and_cycles_are_given_back(program: str) -> None:
    grown, left = printed(program)
    assert grown > 30
    assert left < grown / 2
