"""The log: its rows, its events, the ledger of executions, the quarantine, and the one call that appends."""

from pathlib import Path

from services.chassis.migrations import run_sql

revision = "0001"
down_revision = None


def upgrade() -> None:
    run_sql(Path(__file__).with_suffix(".sql"))
