"""Numbers and enums as people read them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import cast

import pytest

from hearth.cli import words
from hearth.cli.pool import share
from hearth.sandbox.v1 import sandbox_pb2
from hearth.types.v1 import session_pb2


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (59.6, "1 min"),
        (61, "1 min 1 s"),
        (3600, "1 h"),
        (12_000, "3 h 20 min"),
        (90_000, "1 d 1 h"),
        (86_399, "23 h 59 min"),
    ],
)
def test_spans(seconds: float, text: str) -> None:
    assert words.span(seconds) == text


def test_a_clock_that_is_behind_is_no_time_ago() -> None:
    now = datetime.now(UTC)
    assert words.since(now + timedelta(seconds=5), now) == "0 s"


@pytest.mark.parametrize(
    ("micro", "text"),
    [(0, "$0.00"), (170_000, "$0.1700"), (900, "$0.0009"), (99, "under $0.0001"), (3_400_000, "$3.40")],
)
def test_dollars(micro: int, text: str) -> None:
    assert words.dollars(micro) == text


def test_values_of_enums() -> None:
    assert words.tenure(sandbox_pb2.TENURE_PARKED) == "parked"
    assert words.tenure(sandbox_pb2.TENURE_UNSPECIFIED) == ""
    assert words.state(sandbox_pb2.SANDBOX_STATE_STOPPED) == "stopped"
    assert words.state(cast("sandbox_pb2.SandboxState.ValueType", 4711)) == "4711"
    assert words.session(session_pb2.SessionKey(project="p", session="s")) == "p/s"
    assert words.session(session_pb2.SessionKey()) == ""


def test_the_share_of_warm_turns() -> None:
    assert share({}) == "no turns yet"
    assert share({"warm": 3, "cold": 1}) == "75% of 4 turns"
    # A turn that never reached an agent is none of them.
    assert share({"": 2}) == "no turns yet"
