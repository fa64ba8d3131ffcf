"""Removing events by their age: how far the walk over all logs is, its next step, and one batch of one log."""

from pathlib import Path

from services.chassis.migrations import run_sql

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    run_sql(Path(__file__).with_suffix(".sql"))
