"""Background tasks: none dies unseen, none inherits the call that started it, all end at shutdown."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from services.chassis import deadlines
from services.chassis.errors import NotFound, Unavailable
from services.chassis.tasks import Tasks

variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable", default="default")


class Died:
    def __init__(self) -> None:
        self.names: list[str] = []
        self.event = asyncio.Event()

    def __call__(self, name: str) -> None:
        self.names.append(name)
        self.event.set()


@pytest_asyncio.fixture
async def died() -> Died:
    return Died()


@pytest_asyncio.fixture
async def tasks(died: Died) -> AsyncIterator[Tasks]:
    tasks = Tasks(died)
    yield tasks
    await tasks.stop()


async def fail() -> None:
    raise ValueError("broken")


async def test_a_critical_task_that_fails_is_told(tasks: Tasks, died: Died, caplog: pytest.LogCaptureFixture) -> None:
    tasks.start("loop", fail())
    async with asyncio.timeout(1):
        await died.event.wait()
    assert died.names == ["loop"]
    assert "ValueError: broken" in caplog.text


async def test_another_one_is_only_logged(tasks: Tasks, died: Died, caplog: pytest.LogCaptureFixture) -> None:
    await asyncio.wait([tasks.start("turn", fail(), critical=False)])
    await asyncio.sleep(0)
    assert died.names == []
    assert "background task died" in caplog.text
    assert tasks.names == []


async def test_one_that_returns_or_is_cancelled_is_no_death(tasks: Tasks, died: Died) -> None:
    await tasks.start("short", asyncio.sleep(0))
    tasks.start("long", asyncio.sleep(60)).cancel()
    await asyncio.sleep(0.01)
    assert died.names == []
    assert tasks.names == []


async def test_stop_waits_for_the_end_of_each(tasks: Tasks) -> None:
    ended = []

    async def work(name: str) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.02)
            ended.append(name)
            if name == "b":
                # What a task starts while it ends is ended as well.
                tasks.start("c", asyncio.sleep(60))

    tasks.start("a", work("a"))
    tasks.start("b", work("b"))
    await asyncio.sleep(0)
    assert tasks.names == ["a", "b"]
    await tasks.stop()
    assert sorted(ended) == ["a", "b"]
    assert tasks.names == []


async def test_nothing_of_the_call_comes_along(tasks: Tasks) -> None:
    variable.set("of the call")
    deadlines.serve_until(1.0)

    async def look() -> tuple[str, float | None]:
        return variable.get(), deadlines.remaining()

    assert await tasks.start("bare", look()) == ("default", None)
    assert await tasks.start("carrying", look(), context=contextvars.copy_context()) == ("of the call", None)


async def test_a_loop_outlasts_an_outage(tasks: Tasks, died: Died, caplog: pytest.LogCaptureFixture) -> None:
    rounds = 0
    enough = asyncio.Event()

    async def work() -> None:
        nonlocal rounds
        rounds += 1
        if 2 <= rounds <= 4:
            raise [Unavailable("x", reason="DEPENDENCY_UNAVAILABLE"), ConnectionRefusedError(), TimeoutError()][
                rounds - 2
            ]
        if rounds == 6:
            enough.set()

    with caplog.at_level("INFO"):
        tasks.repeat("sweep", work, every=0.001)
        async with asyncio.timeout(5):
            await enough.wait()
    assert died.names == []
    # Said once, not every round.
    assert [record.message for record in caplog.records] == ["background task waits", "background task goes on"]


@pytest.mark.parametrize("error", [ValueError("x"), NotFound("x", reason="NOT_FOUND")])
async def test_a_loop_does_not_outlast_a_defect(tasks: Tasks, died: Died, error: Exception) -> None:
    async def work() -> None:
        raise error

    tasks.repeat("sweep", work, every=0.001)
    async with asyncio.timeout(1):
        await died.event.wait()
    assert died.names == ["sweep"]
