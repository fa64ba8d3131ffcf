"""What the next execution is to tell of."""

from __future__ import annotations

from pathlib import Path

from services.chassis.migrations import run_sql

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Add it."""
    run_sql(Path(__file__).with_suffix(".sql"))
