"""Whatever producers, readers, crashes and flushes come together in: H1-H8, L1 and the cursor rule hold.

Hypothesis makes plans of steps; each is played on two replicas each of history and relay, with a Valkey of their own,
while they are ended and killed and the Valkey is emptied and killed. Of what the second history commits no relay is
told: it has to find that by comparing heads. Then everything settles, and every checker looks at all of it.

`HEARTH_SOAK_PLAYS`, `HEARTH_SOAK_STEPS` and `HEARTH_SOAK_SEED` say how many plays there are, of how many steps, and the
seed of the first one; each next one has the next seed. A play that fails prints what it takes to see it again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests.checkers import CHECKERS
from tests.conftest import GIVEN
from tests.property import breaking
from tests.property.breaking import BreakingPlay, Bus
from tests.support import plays
from tests.support.plays import Step, Tally
from tests.support.servers import Servers
from tests.support.targets import Replicas, Stores, running

SOAKING = "HEARTH_SOAK_PLAYS" in GIVEN
PLAYS = int(GIVEN.get("HEARTH_SOAK_PLAYS", "5"))
LENGTH = int(GIVEN.get("HEARTH_SOAK_STEPS", "60"))
SEED = int(GIVEN.get("HEARTH_SOAK_SEED", "1"))

_KINDS = plays.kinds({**plays.WEIGHTS, **breaking.WEIGHTS})
_NUMBER = st.integers(0, plays.NUMBERS - 1)
_STEP = st.builds(Step, st.sampled_from(_KINDS), _NUMBER, _NUMBER, _NUMBER)
_PLAN = st.lists(_STEP, min_size=LENGTH, max_size=LENGTH)

_SETTINGS = settings(
    # The first plan that Hypothesis makes is the simplest one, and takes no time; the second is the play.
    max_examples=2,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)

Player = Callable[[Sequence[Step]], None]


@pytest.fixture(scope="module")
def tally() -> Tally:
    """What the plays of this module did."""
    return Tally()


@pytest.fixture(scope="module")
def play(servers: Servers, module_postgres_dsn: str, tally: Tally) -> Iterator[Player]:
    """Plays a plan on two replicas of each, on a bus that may be emptied."""
    bus = Bus(servers.scratch() / "valkey")
    stores = Stores(module_postgres_dsn, bus.url)
    replicas = Replicas(servers.scratch(), stores, histories=2, relays=2, mute_valkey_url=servers.empty_valkey())
    try:
        with running(replicas):
            yield lambda plan: asyncio.run(BreakingPlay(replicas, bus, tally).play(plan))
    finally:
        bus.remove()


@pytest.mark.timeout(0 if SOAKING else 600)
def test_guarantees_hold_in_any_play(play: Player, tally: Tally, capsys: pytest.CaptureFixture[str]) -> None:
    def say(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}", flush=True)

    for number in range(SEED, SEED + PLAYS):
        begun = time.monotonic()
        try:
            seed(number)(_SETTINGS(given(_PLAN)(play)))()
        except BaseException:
            say(f"failed; to see it again: make soak SEED={number} PLAYS=1 STEPS={LENGTH}")
            raise
        if SOAKING:
            say(f"seed {number}: {time.monotonic() - begun:.1f} s")
    if SOAKING:
        say(str(tally))
    idle = [name for name in CHECKERS if not tally.checked[name]]
    assert not idle, f"these looked at nothing: {idle}"
