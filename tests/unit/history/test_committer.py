"""Which lane takes new work: what comes together is committed together, and nobody waits for a commit for nothing."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from services.history.committer import best_lane

GROUP = 100


@dataclass(frozen=True)
class Lane:
    """What a lane has to do."""

    events: int
    committing: bool = False


@pytest.mark.parametrize(
    ("lanes", "best"),
    [
        # Nothing to do: any, and always the same one, so that works of one request meet.
        ([Lane(0), Lane(0)], 0),
        # A group that is about to begin is joined, however many lanes are idle.
        ([Lane(0), Lane(30)], 1),
        ([Lane(10), Lane(30)], 1),
        # One that is full is not.
        ([Lane(0), Lane(GROUP)], 0),
        # Nobody waits behind a commit while another lane is free.
        ([Lane(5, committing=True), Lane(0)], 1),
        ([Lane(5, committing=True), Lane(90)], 1),
        # All commit: the one with the least to do.
        ([Lane(50, committing=True), Lane(40, committing=True), Lane(60, committing=True)], 1),
        ([Lane(50, committing=True), Lane(2 * GROUP)], 0),
    ],
)
def test_where_new_work_goes(lanes: list[Lane], best: int) -> None:
    assert best_lane(lanes, GROUP) == best
