"""Work for many callers: each gets a run that began after it asked, and runs never overlap."""

from __future__ import annotations

import asyncio

import pytest

from services.chassis.errors import Unavailable
from services.chassis.tasks import Tasks
from services.relay.shared import Shared


class Work:
    """Counts its runs; each waits until it is let go."""

    def __init__(self) -> None:
        self.begun = 0
        self.running = 0
        self.gate = asyncio.Event()
        self.error: Unavailable | None = None

    async def __call__(self) -> int:
        self.begun += 1
        self.running += 1
        assert self.running == 1
        number = self.begun
        await self.gate.wait()
        self.running -= 1
        if self.error is not None:
            raise self.error
        return number


def shared(work: Work) -> Shared[int]:
    return Shared("test", work, Tasks(pytest.fail))


async def test_callers_share_a_run_that_began_after_they_asked() -> None:
    work = Work()
    together = shared(work)
    first = [asyncio.create_task(together.next()) for _ in range(3)]
    await asyncio.sleep(0.01)
    second = [asyncio.create_task(together.next()) for _ in range(3)]
    await asyncio.sleep(0.01)
    assert work.begun == 1
    work.gate.set()
    assert await asyncio.gather(*first) == [1, 1, 1]
    assert await asyncio.gather(*second) == [2, 2, 2]
    assert await together.next() == 3


async def test_a_failure_is_that_of_all_who_share_it_and_of_nobody_else() -> None:
    work = Work()
    together = shared(work)
    work.error = Unavailable("away", reason="DEPENDENCY_UNAVAILABLE")
    work.gate.set()
    failed: tuple[object, object] = await asyncio.gather(together.next(), together.next(), return_exceptions=True)
    assert [*failed] == [work.error, work.error]
    work.error = None
    assert await together.next() == 2


async def test_a_caller_that_gives_up_takes_nothing_from_the_others() -> None:
    work = Work()
    together = shared(work)
    one, other = asyncio.create_task(together.next()), asyncio.create_task(together.next())
    await asyncio.sleep(0.01)
    one.cancel()
    work.gate.set()
    assert await other == 1
    assert one.cancelled()


async def test_who_waits_at_the_end_is_refused() -> None:
    work = Work()
    together = shared(work)
    waiting = [asyncio.create_task(together.next())]
    await asyncio.sleep(0.01)
    waiting.append(asyncio.create_task(together.next()))
    await asyncio.sleep(0.01)
    together.close()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [getattr(result, "reason", None) for result in results] == ["STREAM_CLOSED"] * 2
