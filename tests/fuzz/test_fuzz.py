"""A short fuzz run: no RPC answers as if nobody had thought of the case, nobody dies, nothing is held afterwards."""

from __future__ import annotations

from pathlib import Path

from tests.fuzz.gauges import slope
from tests.fuzz.session import fuzz
from tests.support.rpcs import RPCS

SEED = 20


async def test_hostile_messages_are_refused(scratch: Path) -> None:
    found = await fuzz(scratch / ".hearth", seed=SEED, seconds=8.0, workers=2)
    assert not found.problems, "\n".join(found.problems)
    assert {path for path, _ in found.answers} == {rpc.path for rpc in RPCS}
    assert {code for _, code in found.answers} >= {"OK", "INVALID_ARGUMENT"}


def test_slope_is_that_of_the_last_part() -> None:
    flat_then_steep = [(float(at), 10.0 if at < 60 else 10.0 + (at - 60) / 60) for at in range(121)]
    assert abs(slope(flat_then_steep, 60) - 1.0) < 1e-6
    assert slope([(0.0, 5.0)], 60) == 0.0
