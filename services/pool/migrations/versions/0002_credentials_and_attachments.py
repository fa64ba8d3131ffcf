"""Credentials of projects, and the files that are attached to messages."""

from __future__ import annotations

from pathlib import Path

from services.chassis.migrations import run_sql

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Make the tables."""
    run_sql(Path(__file__).with_suffix(".sql"))
