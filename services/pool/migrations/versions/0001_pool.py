"""Everything the pool keeps: sessions, executions, inputs, commands, gates, requests, outbox, replicas."""

from __future__ import annotations

from pathlib import Path

from services.chassis.migrations import run_sql

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Make the tables."""
    run_sql(Path(__file__).with_suffix(".sql"))
