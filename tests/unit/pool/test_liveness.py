"""What counts as a reason to ask for a sandbox, and which answers end a turn."""

from __future__ import annotations

import pytest

from services.pool.harness.port import Pulse, Silence
from services.pool.turns.liveness import doubtful, judge


@pytest.mark.parametrize(
    ("silence", "asked"),
    [
        (Silence(connected=True, bytes=0, messages=0), False),
        (Silence(connected=True, bytes=16, messages=900), False),
        (Silence(connected=True, bytes=20, messages=20), True),
        (Silence(connected=False, bytes=0, messages=0), True),
    ],
)
def test_an_agent_that_thinks_is_no_reason_and_a_daemon_without_heartbeat_is(silence: Silence, asked: bool) -> None:
    assert doubtful(silence) is asked


@pytest.mark.parametrize(
    ("pulse", "refusals", "code"),
    [
        (Pulse.ALIVE, 0, ""),
        (Pulse.SILENT, 0, ""),
        (Pulse.REFUSED, 1, ""),
        (Pulse.REFUSED, 2, "DAEMON_UNREACHABLE"),
        (Pulse.FENCED, 0, "HARNESS_UNREACHABLE"),
    ],
)
def test_only_a_plain_answer_ends_a_turn(pulse: Pulse, refusals: int, code: str) -> None:
    loss = judge(pulse, refusals)
    assert (loss.code if loss is not None else "") == code
