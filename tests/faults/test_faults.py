"""A few faults of fixed seeds in every run of the tests; `make faults` plays all of them, in any order."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults.plan import plan
from tests.faults.play import play

SESSIONS = 3


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("seed", "replicas", "faults"),
    [
        (2, (1, 2), ["restore", "kill:relay+valkey", "freeze:history"]),
        pytest.param(
            1,
            (2, 1),
            ["kill:history+postgres", "cut:history-postgres", "flush", "kill:producer"],
            marks=pytest.mark.exhaustive,
        ),
    ],
)
async def test_faults_break_no_promise(scratch: Path, seed: int, replicas: tuple[int, int], faults: list[str]) -> None:
    histories, relays = replicas
    made = plan(seed, only=faults, histories=histories, relays=relays)
    outcome = await play(made, scratch, print, sessions=SESSIONS)
    assert not outcome.wrong, "\n".join(outcome.wrong[:20])
    idle = [name for name, verdict in outcome.verdicts.items() if not verdict.checked]
    assert set(idle) <= {"stale", "starved", "restored"}, "a checker looked at nothing"
