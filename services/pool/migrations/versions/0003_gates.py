"""Which execution handed an answer to an agent."""

from __future__ import annotations

from pathlib import Path

from services.chassis.migrations import run_sql

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Add it."""
    run_sql(Path(__file__).with_suffix(".sql"))
