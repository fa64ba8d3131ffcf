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


def growth(how: str) -> float:
    """MiB that a process keeps of 20 MB of messages."""
    ran = subprocess.run([sys.executable, "-c", _GROWTH, how], check=True, capture_output=True, text=True)
    return float(ran.stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc is told")
def test_large_messages_leave_nothing() -> None:
    assert growth("keep") > 15
    assert growth("give back") < 10
