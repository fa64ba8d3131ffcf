"""The applied network policy of a sandbox, and breakers that wait for a person."""

from __future__ import annotations

from pathlib import Path

from services.chassis.migrations import run_sql

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Run the SQL beside this file."""
    run_sql(Path(__file__).with_suffix(".sql"))
