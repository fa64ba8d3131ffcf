"""Settings of the history service."""

from __future__ import annotations

from datetime import timedelta

from pydantic import Field, field_validator

from services.chassis.settings import PostgresSettings, ValkeySettings
from services.history.lane import Limits

# Producers may send again what they have no answer for; what is younger than this may still be on its way.
_SHORTEST_RETENTION_SECONDS = 86_400.0


class HistorySettings(PostgresSettings, ValkeySettings):
    """What the history service reads from the environment. Valkey may be away, at the start too: notices are hints."""

    history_lanes: int = Field(default=2, ge=1, le=64, description="commits that may be in flight at the same time")
    history_group_events: int = Field(default=1_000, ge=1, description="events of one commit, at most")
    history_group_bytes: int = Field(default=4 * 1024 * 1024, ge=1, description="bytes of one commit, at most")
    history_queue_events: int = Field(default=50_000, ge=1, description="events that may wait; more is OVERLOADED")
    history_queue_bytes: int = Field(
        default=64 * 1024 * 1024, ge=1, description="bytes that may wait; more is OVERLOADED"
    )

    history_retention: float = Field(
        default=0.0, ge=0, description="seconds after which events are removed, a day at least; 0 = kept for ever"
    )

    @field_validator("history_retention")
    @classmethod
    def _is_long_enough(cls, value: float) -> float:
        if 0 < value < _SHORTEST_RETENTION_SECONDS:
            raise ValueError(f"must be 0 (events are kept for ever) or at least {_SHORTEST_RETENTION_SECONDS:.0f} s")
        return value

    @property
    def retention(self) -> timedelta | None:
        """Age at which events are removed; None keeps them for ever."""
        return timedelta(seconds=self.history_retention) if self.history_retention else None

    @property
    def limits(self) -> Limits:
        """Bounds of the committer."""
        return Limits(
            lanes=self.history_lanes,
            group_events=self.history_group_events,
            group_bytes=self.history_group_bytes,
            queue_events=self.history_queue_events,
            queue_bytes=self.history_queue_bytes,
        )
