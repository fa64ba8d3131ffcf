"""Who removes the rest of a deleted log takes turns; one that was called removed too early is removed again."""

from pathlib import Path

from services.chassis.migrations import run_sql

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    run_sql(Path(__file__).with_suffix(".sql"))
