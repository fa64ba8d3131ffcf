"""Whatever producers, readers, crashes and flushes come together in: H1-H8, L1 and the cursor rule hold.

Hypothesis makes plans of steps; each is played on two replicas each of history and relay, with a Valkey of their own,
while they are ended, killed and the Valkey is emptied. Then everything settles, and every checker looks at all of it.

`HEARTH_SOAK_PLAYS`, `HEARTH_SOAK_STEPS` and `HEARTH_SOAK_SEED` say how many plays there are, of how many steps, and the
seed of the first one; each next one has the next seed. A play that fails prints what it takes to see it again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from hearth.embedded.valkey import EmbeddedValkey
from tests.checkers import CHECKERS
from tests.conftest import GIVEN
from tests.property.plays import STEPS, House, Play, Step
from tests.support.servers import Servers
from tests.support.targets import Replicas, Stores, running

SOAKING = "HEARTH_SOAK_PLAYS" in GIVEN
PLAYS = int(GIVEN.get("HEARTH_SOAK_PLAYS", "5"))
LENGTH = int(GIVEN.get("HEARTH_SOAK_STEPS", "60"))
SEED = int(GIVEN.get("HEARTH_SOAK_SEED", "1"))

# How often a step comes, beside the others.
_WEIGHTS = {
    "wait": 8,
    "open conversation": 2,
    "begin": 6,
    "again": 3,
    "take over": 2,
    "say": 18,
    "complete": 8,
    "chat": 18,
    "use tools": 6,
    "end": 5,
    "state fact": 5,
    "resend": 4,
    "alter": 3,
    "end wrongly": 3,
    "intrude": 3,
    "output of the past": 4,
    "repeat frames": 3,
    "send malformed": 3,
    "join": 12,
    "leave": 3,
    "come back": 4,
    "stall": 3,
    "go on": 4,
    "read": 6,
    "kill": 2,
    "end process": 2,
    "empty the bus": 2,
}
_KINDS = [kind for kind, weight in _WEIGHTS.items() for _ in range(weight)]
_NUMBER = st.integers(0, 999)
_STEP = st.builds(Step, st.sampled_from(_KINDS), _NUMBER, _NUMBER, _NUMBER)

_SETTINGS = settings(
    # The first plan that Hypothesis makes is the simplest one, and takes no time; the second is the play.
    max_examples=2,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(scope="module")
def house(servers: Servers, module_postgres_dsn: str) -> Iterator[House]:
    """Two replicas of each, on a bus that may be emptied."""
    valkey = EmbeddedValkey(servers.scratch() / "valkey")
    url = valkey.start_detached().url
    replicas = Replicas(servers.scratch(), Stores(module_postgres_dsn, url), histories=2, relays=2)
    try:
        with running(replicas):
            yield House(replicas, url)
    finally:
        valkey.remove()


def test_every_step_is_played() -> None:
    assert set(_WEIGHTS) == set(STEPS)


@pytest.mark.timeout(0 if SOAKING else 600)
def test_guarantees_hold_in_any_play(house: House, capsys: pytest.CaptureFixture[str]) -> None:
    def play(plan: Sequence[Step]) -> None:
        asyncio.run(Play(house).play(plan))

    for number in range(SEED, SEED + PLAYS):
        begun = time.monotonic()
        test = seed(number)(_SETTINGS(given(st.lists(_STEP, min_size=LENGTH, max_size=LENGTH))(play)))
        try:
            test()
        except BaseException:
            with capsys.disabled():
                print(f"\nfailed: make soak SEED={number} PLAYS=1 STEPS={LENGTH}")
            raise
        if SOAKING:
            with capsys.disabled():
                print(f"\nseed {number}: {time.monotonic() - begun:.1f} s", flush=True)
    with capsys.disabled():
        if SOAKING:
            for what, counts in (("steps", house.steps), ("saw", house.saw), ("looked at", house.checked)):
                print(f"{what}: {', '.join(f'{number} {name}' for name, number in counts.most_common())}")
    idle = [name for name in CHECKERS if not house.checked[name]]
    assert not idle, f"these looked at nothing: {idle}"
