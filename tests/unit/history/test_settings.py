"""What the history service reads from its environment."""

from __future__ import annotations

from datetime import timedelta

import pytest
from pydantic import ValidationError

from hearth.secret import Secret
from services.history.settings import HistorySettings


def settings(retention: float) -> HistorySettings:
    """Settings with this retention, in seconds."""
    return HistorySettings(
        postgres_dsn=Secret("postgresql://nowhere/x"), valkey_url=Secret("redis://nowhere"), history_retention=retention
    )


def test_events_are_kept_for_ever_unless_it_is_said() -> None:
    assert settings(0).retention is None
    assert settings(90 * 86_400).retention == timedelta(days=90)


@pytest.mark.parametrize("seconds", [-1, 30, 86_399])
def test_a_retention_that_reaches_what_is_still_on_its_way_is_refused(seconds: float) -> None:
    with pytest.raises(ValidationError, match="history_retention"):
        settings(seconds)
