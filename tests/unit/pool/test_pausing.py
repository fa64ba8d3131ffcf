"""When a turn that waits for people is paused."""

from __future__ import annotations

import pytest

from services.pool.turns.pausing import QUIET, QUIET_AT_MOST, Standing, Why, pause_at

WINDOW, TOOL = 600.0, 1800.0


@pytest.mark.parametrize(
    ("standing", "why", "at"),
    [
        (Standing(asked_at=100, heard_at=100), Why.WINDOW, 700),
        # It waits for the last question, whenever its agent spoke.
        (Standing(asked_at=100, heard_at=300), Why.WINDOW, 700),
        # An agent that talks on is waited for, but not for ever.
        (Standing(asked_at=100, heard_at=700), Why.WINDOW, 700 + QUIET),
        (Standing(asked_at=100, heard_at=800), Why.WINDOW, 700 + QUIET_AT_MOST),
        (Standing(asked_at=100, heard_at=100, working=True), Why.WINDOW, 700 + TOOL),
        # What it asks for in the same moment is asked together with it.
        (Standing(asked_at=100, heard_at=100, has_place=False), Why.ROOM, 100 + QUIET),
        (Standing(asked_at=100, heard_at=101, has_place=False), Why.ROOM, 101 + QUIET),
        (Standing(asked_at=100, heard_at=100, has_place=False, working=True), Why.ROOM, 100 + TOOL),
        (Standing(asked_at=100, heard_at=100, leaving_at=200), Why.LEAVING, 200),
        (Standing(asked_at=100, heard_at=200, leaving_at=200), Why.LEAVING, 200 + QUIET),
        # It asked while the process was ending already.
        (Standing(asked_at=300, heard_at=300, leaving_at=200), Why.LEAVING, 300 + QUIET),
        (Standing(asked_at=100, heard_at=100, leaving_at=200, working=True), Why.LEAVING, 200 + TOOL),
        (Standing(100, 210, leaving_at=200, now_or_never=True, working=True), Why.LEAVING, 200),
    ],
)
def test_pause_at(standing: Standing, why: Why, at: float) -> None:
    found, moment = pause_at(standing, window=WINDOW, tool_call_limit=TOOL)
    assert found is why
    assert moment == pytest.approx(at)


def test_without_a_window_nobody_is_waited_for() -> None:
    found, moment = pause_at(Standing(100, 100), window=0, tool_call_limit=TOOL)
    assert found is Why.WINDOW
    assert moment == pytest.approx(100 + QUIET)
