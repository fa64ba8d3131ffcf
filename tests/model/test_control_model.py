"""Whatever is asked of sessions in whatever order, while their turns end, ask, and their pool dies: the pool answers as
the small model of `worlds.py` does, and C1 to C5, P1 and H6 hold.

Hypothesis makes the plays, so many that they have 2,000 steps together. `HEARTH_MODEL_PLAYS`, `HEARTH_MODEL_STEPS` and
`HEARTH_MODEL_SEED` say how many there are, of how many steps, and the seed of the first one; each next one has the next
seed. A play that fails prints what it takes to see it again.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

from tests.checkers.control import CHECKERS
from tests.conftest import GIVEN
from tests.model.machine import ControlMachine, Tally
from tests.support.control_stage import Stage
from tests.support.servers import Servers

SOAKING = "HEARTH_MODEL_PLAYS" in GIVEN
PLAYS = int(GIVEN.get("HEARTH_MODEL_PLAYS", "6"))
STEPS = int(GIVEN.get("HEARTH_MODEL_STEPS", "480"))
SEED = int(GIVEN.get("HEARTH_MODEL_SEED", "1"))
LEAST_STEPS = 2_000


@pytest.fixture(scope="module")
def stage(servers: Servers) -> Iterator[Stage]:
    """The services."""
    found = Stage(servers)
    with found.house.running():
        yield found


@pytest.mark.timeout(0 if SOAKING else 600)
def test_the_pool_does_what_the_model_does(stage: Stage, capsys: pytest.CaptureFixture[str]) -> None:
    tally = Tally()

    def say(text: str) -> None:
        with capsys.disabled():
            print(f"\n{text}", flush=True)

    with asyncio.Runner() as loop:
        machine = ControlMachine.of(stage, tally, loop, most_crashes=1_000 if SOAKING else 1)
        number = SEED
        while number < SEED + PLAYS or (not SOAKING and tally.steps.total() < LEAST_STEPS):
            begun = time.monotonic()
            try:
                play = seed(number)(machine)
                run_state_machine_as_test(
                    play,
                    settings=settings(
                        # The first one does nothing, see `begin`.
                        max_examples=2,
                        stateful_step_count=STEPS,
                        deadline=None,
                        database=None,
                        phases=[Phase.generate],
                        suppress_health_check=list(HealthCheck),
                    ),
                )
            except BaseException:
                say(next(iter(tally.failures), ""))
                say(str(tally))
                say(f"failed; to see it again: make soak-control SEED={number} PLAYS=1 STEPS={STEPS}")
                raise
            if SOAKING:
                say(f"seed {number}: {time.monotonic() - begun:.1f} s")
            number += 1
        loop.run(stage.close())
    if SOAKING:
        say(str(tally))
    idle = [name for name in CHECKERS if not tally.checked[name]]
    assert not idle, f"these looked at nothing: {idle}"
