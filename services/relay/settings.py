"""Settings of the relay."""

from __future__ import annotations

from pydantic import Field

from services.chassis.settings import ValkeySettings


class RelaySettings(ValkeySettings):
    """Durations are seconds, sizes bytes."""

    relay_heartbeat: float = Field(default=15.0, gt=0, description="silence after which a reader gets a heartbeat")
    relay_slow_reader: float = Field(
        default=60.0, gt=0, description="a reader that takes nothing is cut off after this"
    )
    relay_reader_bytes: int = Field(default=1024 * 1024, ge=64 * 1024, description="what may wait for one reader")
    relay_reader_items: int = Field(default=4096, ge=16, description="how many items may wait for one reader")
    relay_buffer_bytes: int = Field(default=4 * 1024 * 1024, ge=64 * 1024, description="frames kept of one session")
    relay_buffer_frames: int = Field(default=20_000, ge=1, description="how many frames are kept of one session")
    relay_turn_limit: float = Field(default=7200.0, gt=0, description="frames of a turn are kept one hour longer")
    relay_tick: float = Field(default=0.04, gt=0, description="how often readers are written to when many wait")
    relay_quick_tick: float = Field(default=0.004, ge=0, description="the same when few wait")
    relay_quick_readers: int = Field(default=8, ge=0, description="up to how many waiting readers count as few")
    relay_history_timeout: float = Field(default=3.0, gt=0, description="one read of the history")
    relay_heads_every: float = Field(default=1.0, gt=0, description="how often heads of active sessions are compared")
    relay_heads_idle_within: float = Field(default=10.0, gt=0, description="within what time those of all others are")
