"""The table of the sample."""

from pathlib import Path

from services.chassis.migrations import run_sql

revision = "0001"
down_revision = None


def upgrade() -> None:
    run_sql(Path(__file__).with_suffix(".sql"))
