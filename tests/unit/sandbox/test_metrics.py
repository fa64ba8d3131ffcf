"""What is shown of the sandboxes, by the rows and the settings."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping
from typing import Any, cast

from services.chassis.metrics import Read, Reading, Readings
from services.sandbox.metrics import BREAKER, SLOTS, WARM_CAP, watch
from services.sandbox.tiers import Tier

TIERS = {"local": Tier(window=60, cap=8, park_stopped=True), "daytona": Tier(window=0, cap=20, park_stopped=True)}


class Rows:
    """Rows of which only these say something."""

    def __init__(self, *, used: Mapping[str, int], unknown: Mapping[str, int]) -> None:
        self._used, self._unknown = used, unknown

    async def present(self) -> list[Any]:
        return []

    async def slots_used(self) -> Mapping[str, int]:
        return self._used

    async def breakers(self) -> Mapping[str, int]:
        return self._unknown


class Watched:
    """What is to be read."""

    def __init__(self) -> None:
        self.reads: list[Read] = []

    def watch(self, read: Read, *families: object, every: float = 0.0) -> None:
        self.reads.append(read)


async def shown(rows: Rows) -> Reading:
    watched = Watched()
    watch(cast(Readings, watched), cast(Any, rows), TIERS)
    return await cast(Awaitable[Reading], watched.reads[0]())


async def test_unknown_instances_are_those_of_providers_that_are_on() -> None:
    found = await shown(Rows(used={}, unknown={"local": 7, "switched-off": 9}))
    assert found[BREAKER] == {"local": 7, "daytona": 0}


async def test_the_cap_is_that_of_the_settings_however_many_slots_are_taken() -> None:
    found = await shown(Rows(used={"local": 20, "daytona": 2}, unknown={}))
    assert found[WARM_CAP] == {"local": 8, "daytona": 0}
    assert cast(Any, found[SLOTS])["local", "used"] == 20
