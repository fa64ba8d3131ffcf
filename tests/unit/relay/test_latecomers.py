"""Healing after the bus was away: a session whose last reader leaves meanwhile disturbs no other."""

from __future__ import annotations

import asyncio
from typing import cast

from services.chassis.tasks import Tasks
from services.relay.buffer import Kept
from services.relay.follower import Follower, Parts
from services.relay.latecomers import Latecomers


class Hanging:
    """A follower whose bus does not answer."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def read_kept(self) -> Kept | None:
        self.asked.set()
        await asyncio.Event().wait()
        return None


class OnlyTasks:
    """Of the parts, what is needed here."""

    def __init__(self, tasks: Tasks) -> None:
        self.tasks = tasks


def _dies(name: str) -> None:
    raise AssertionError(f"{name} died")


async def test_healing_ends_quietly_when_the_session_is_closed() -> None:
    tasks, follower = Tasks(_dies), Hanging()
    latecomers = Latecomers(("p", "s"), cast("Parts", OnlyTasks(tasks)), cast("Follower", follower))
    healing = asyncio.create_task(latecomers.heal())
    await follower.asked.wait()
    latecomers.close()
    await asyncio.wait_for(healing, 5)
    await tasks.stop()
