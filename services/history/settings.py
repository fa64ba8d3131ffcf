"""Settings of the history service."""

from __future__ import annotations

from pydantic import Field

from services.chassis.settings import PostgresSettings, ValkeySettings
from services.history.lane import Limits


class HistorySettings(PostgresSettings, ValkeySettings):
    """What the history service reads from the environment. Valkey may be away, at the start too: notices are hints."""

    history_lanes: int = Field(default=2, ge=1, le=64, description="commits that may be in flight at the same time")
    history_group_events: int = Field(default=1_000, ge=1, description="events of one commit, at most")
    history_group_bytes: int = Field(default=4 * 1024 * 1024, ge=1, description="bytes of one commit, at most")
    history_queue_events: int = Field(default=50_000, ge=1, description="events that may wait; more is OVERLOADED")
    history_queue_bytes: int = Field(
        default=64 * 1024 * 1024, ge=1, description="bytes that may wait; more is OVERLOADED"
    )

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
