"""The ring numbers messages without a hole, keeps the newest within its bytes, and wakes whoever waits."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.sandbox.agentd.ring import Ring


@given(
    sizes=st.lists(st.integers(0, 40), max_size=400),
    limit=st.integers(1, 300),
    asked=st.integers(0, 450),
    max_bytes=st.integers(1, 200),
)
def test_it_holds_what_a_plain_list_would(sizes: list[int], limit: int, asked: int, max_bytes: int) -> None:
    ring = Ring(limit)
    everything = [bytes([index % 256]) * size for index, size in enumerate(sizes)]
    for index, message in enumerate(everything):
        assert ring.append(message) == index + 1
        assert ring.size <= limit or ring.oldest == ring.newest
    assert ring.newest == len(everything)
    kept = list(enumerate(everything, start=1))[ring.oldest - 1 :]
    assert ring.size == sum(len(message) for _, message in kept)
    # No more than needed was dropped.
    if ring.oldest > 1:
        assert ring.size + len(everything[ring.oldest - 2]) > limit
    expected = [(number, message) for number, message in kept if number > asked]
    batch = ring.after(asked, max_bytes)
    assert batch == expected[: len(batch)]
    assert bool(batch) == bool(expected)
    if len(batch) < len(expected):
        assert sum(len(message) for _, message in expected[: len(batch) + 1]) > max_bytes
    if len(batch) > 1:
        assert sum(len(message) for _, message in batch) <= max_bytes


def test_one_message_above_the_limit_stays_until_the_next() -> None:
    ring = Ring(10)
    ring.append(b"small")
    ring.append(b"x" * 100)
    assert ring.after(0) == [(2, b"x" * 100)]
    ring.append(b"small")
    assert ring.after(0) == [(3, b"small")]


def test_a_million_messages_cost_a_constant_each() -> None:
    ring = Ring(1000)
    for _ in range(1_000_000):
        ring.append(b"0123456789")
    assert (ring.oldest, ring.newest) == (999_901, 1_000_000)
    assert len(ring.after(0)) == 100


async def test_waiting_ends_with_a_message_and_with_the_close() -> None:
    ring = Ring()
    assert await ring.wait(0, timeout=0.01) is False
    waiting = [asyncio.create_task(ring.wait(0, timeout=5)) for _ in range(3)]
    behind = asyncio.create_task(ring.wait(1, timeout=5))
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    ring.append(b"a")
    assert await asyncio.gather(*waiting[1:]) == [True, True]
    assert not behind.done()
    ring.close()
    assert await behind is True
    assert await ring.wait(7, timeout=5) is True
    assert ring.after(0) == [(1, b"a")]
    with pytest.raises(RuntimeError):
        ring.append(b"b")
