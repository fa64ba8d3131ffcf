"""Deployment, sessions and their claims, sandboxes, warm slots, usage."""

from __future__ import annotations

from pathlib import Path

from services.chassis.migrations import run_sql

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Run the SQL beside this file."""
    run_sql(Path(__file__).with_suffix(".sql"))
