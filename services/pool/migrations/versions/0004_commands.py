"""Kinds of commands that a newer version writes, and what the retention of settled rows looks by."""

from __future__ import annotations

from pathlib import Path

from services.chassis.migrations import run_sql

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Change the tables."""
    run_sql(Path(__file__).with_suffix(".sql"))
