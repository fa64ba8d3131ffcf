"""Few waiting readers are written to at once, many together at a beat, and each hub once for all that came."""

from __future__ import annotations

import asyncio

from services.relay.ticker import Ticker


class Hub:
    """Counts how often it is flushed, and when."""

    def __init__(self, waiting: int) -> None:
        self.waiting = waiting
        self.flushed: list[float] = []

    def flush(self) -> None:
        self.flushed.append(asyncio.get_running_loop().time())


async def test_few_readers_are_written_to_at_once() -> None:
    ticker, hub = Ticker(tick=5.0, quick=0.0, few=2), Hub(2)
    for expected in (1, 2, 3):
        ticker.dirty(hub)
        ticker.dirty(hub)
        await asyncio.sleep(0.01)
        assert len(hub.flushed) == expected


async def test_many_readers_wait_for_the_beat() -> None:
    ticker, hub, other = Ticker(tick=0.1, quick=0.0, few=2), Hub(3), Hub(1)
    ticker.dirty(hub)
    await asyncio.sleep(0.01)
    assert len(hub.flushed) == 1
    ticker.dirty(hub)
    await asyncio.sleep(0.03)
    ticker.dirty(other)
    assert len(hub.flushed) == 1
    await asyncio.sleep(0.12)
    assert len(hub.flushed) == 2
    assert hub.flushed[1] - hub.flushed[0] >= 0.09
    assert len(other.flushed) == 1


async def test_what_went_away_is_not_flushed() -> None:
    ticker, hub, other = Ticker(tick=0.1, quick=0.0, few=2), Hub(1), Hub(1)
    ticker.dirty(hub)
    ticker.dirty(other)
    ticker.forget(hub)
    await asyncio.sleep(0.01)
    assert (len(hub.flushed), len(other.flushed)) == (0, 1)
    ticker.dirty(other)
    ticker.close()
    await asyncio.sleep(0.01)
    assert len(other.flushed) == 1
