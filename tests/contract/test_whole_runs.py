"""Whole runs of producers, readers and retries of which nobody chose the course; every checker looks at all of each.

Nothing is broken here, so this runs on anybody's services. `tests/property` plays the same while ours are killed.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.checkers import CHECKERS
from tests.support.exhaustive import sampled
from tests.support.plays import Play, Tally, random_plan
from tests.support.servers import Servers
from tests.support.targets import Replicas, Stores, Target, running

STEPS = 80


@pytest.fixture(scope="module")
def target(given_target: Target | None, request: pytest.FixtureRequest) -> Iterator[Target]:
    """The services under test."""
    if given_target is not None:
        yield given_target
        return
    servers: Servers = request.getfixturevalue("servers")
    stores = Stores(request.getfixturevalue("module_postgres_dsn"), request.getfixturevalue("module_valkey_url"))
    replicas = Replicas(servers.scratch(), stores, histories=2, relays=2)
    with running(replicas):
        yield replicas.target


@pytest.mark.parametrize("seed", sampled(range(3), every=3))
async def test_guarantees_hold_in_a_whole_run(target: Target, seed: int) -> None:
    tally = Tally()
    await Play(target, tally).play(random_plan(seed, STEPS))
    idle = [name for name in CHECKERS if not tally.checked[name]]
    assert not idle, f"these looked at nothing: {idle}"
