"""Work for many callers: each gets a run that began after it asked, and runs never overlap; so do questions."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from services.chassis.errors import Unavailable
from services.chassis.tasks import Tasks
from services.relay.shared import Gathered, Shared


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


async def test_who_waits_for_a_run_that_never_begins_is_refused() -> None:
    together = shared(Work())
    waiting = [asyncio.create_task(together.next())]
    # One step, with which the run is about to begin.
    await asyncio.sleep(0)
    together.close()
    waiting.append(asyncio.create_task(together.next()))
    assert not (await asyncio.wait(waiting, timeout=5))[1]
    assert [getattr(found.exception(), "reason", None) for found in waiting] == ["STREAM_CLOSED"] * 2


class Asking:
    """Answers with the length of each key; each question waits until it is let go."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.gate = asyncio.Event()
        self.error: Unavailable | None = None

    async def __call__(self, keys: Sequence[str]) -> dict[str, int]:
        self.asked.append(list(keys))
        await self.gate.wait()
        if self.error is not None:
            raise self.error
        return {key: len(key) for key in keys}


async def test_what_many_want_to_know_is_asked_once() -> None:
    ask = Asking()
    gathered = Gathered("test", ask, Tasks(pytest.fail))
    first = asyncio.create_task(gathered.of("a"))
    await asyncio.sleep(0.01)
    rest = [asyncio.create_task(gathered.of(key)) for key in ("bb", "a", "ccc", "bb")]
    await asyncio.sleep(0.01)
    assert ask.asked == [["a"]]
    ask.gate.set()
    assert await first == 1
    assert await asyncio.gather(*rest) == [2, 1, 3, 2]
    # Who asked again while "a" was being asked for gets an answer that was made after that.
    assert ask.asked == [["a"], ["bb", "a", "ccc"]]


async def test_a_question_that_fails_fails_for_all_who_asked_and_not_for_the_next() -> None:
    ask = Asking()
    ask.gate.set()
    ask.error = Unavailable("away", reason="DEPENDENCY_UNAVAILABLE")
    gathered = Gathered("test", ask, Tasks(pytest.fail))
    failed = list(await asyncio.gather(gathered.of("a"), gathered.of("b"), return_exceptions=True))
    assert failed == [ask.error, ask.error]
    ask.error = None
    assert await gathered.of("a") == 1
