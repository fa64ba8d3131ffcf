"""Random traffic through all four services on the stand-in of Daytona while every kind of its faults strikes.

The short form of `hearth bench traffic`. What ran and what took traffic is judged by the stand-in's own journal, what
became of the inputs by the logs of the sessions. A failure names the seed; the logs of all processes and the journal
are in the directory that it names too.
"""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import traffic


@pytest.mark.exhaustive
@pytest.mark.timeout(300)
async def test_traffic_while_everything_goes_wrong_now_and_then(tmp_path: Path) -> None:
    """S1, S2, S3, P2, H6 and C4 in one: one sandbox a session, never more kept than the cap, none left, one ending for
    each input, no failure without a fault."""
    seed = int(os.environ.get("HEARTH_TRAFFIC_SEED") or random.SystemRandom().randrange(10_000))
    said: list[str] = []
    shape = replace(traffic.SMALL, seed=seed)
    part = await traffic.measure(shape, said.append, keep_logs=tmp_path / "logs")
    told = "\n".join([f"HEARTH_TRAFFIC_SEED={seed}", *said, str(part.figures), f"logs: {tmp_path / 'logs'}"])
    assert part.problems == [], told
    missed = [target for target in traffic.targets(part.figures, shape) if not target.ok]
    assert missed == [], told
    assert part.figures["turns"], told
    assert sum(value for name, value in part.figures.items() if name.startswith("fired_")), told
