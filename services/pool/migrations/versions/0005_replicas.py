"""Where a replica listens."""

from __future__ import annotations

from pathlib import Path

from services.chassis.migrations import run_sql

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Add it, and what is looked up by who drives."""
    run_sql(Path(__file__).with_suffix(".sql"))
