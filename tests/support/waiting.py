"""Waiting for what tells nobody that it happened: processes that end, files that appear."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import psutil


async def eventually(condition: Callable[[], object], timeout: float = 20.0) -> None:
    """Return when `condition` holds; TimeoutError when it does not within `timeout` seconds."""
    async with asyncio.timeout(timeout):
        while not condition():  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.01)


def ended(pid: int) -> bool:
    """Whether a process has ended; one that nobody reaped yet has."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


async def pid_in(path: Path) -> int:
    """The process id that a shell writes to a file."""
    await eventually(lambda: path.exists() and path.read_text().strip())
    return int(path.read_text())
