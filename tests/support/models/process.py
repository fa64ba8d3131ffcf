"""The stand-in as a process beside a test, so that it serves whichever event loop the test runs in."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.support import processes
from tests.support.models.server import Asked
from tests.support.waiting import eventually

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, slots=True)
class Models:
    """The stand-in that serves. Give each agent a `name` of its own, and its log tells of nobody else."""

    url: str

    def base(self, name: str) -> str:
        """What the requests of `name` begin with, without `/v1`."""
        return f"{self.url}/{name}"

    async def asked(self, name: str) -> list[Asked]:
        """What models were asked under this name, oldest first, without what an agent wanted to know for itself."""
        return [entry for entry in await self.everything(name) if entry.tools]

    async def everything(self, name: str) -> list[Asked]:
        """All that models were asked under this name."""
        return [Asked(**entry) for entry in await self._get(f"{self.url}/{name}/_log")]

    async def body(self, name: str, number: int) -> dict[str, Any]:
        """The body of a request."""
        found: dict[str, Any] = await self._get(f"{self.url}/{name}/_log/{number}")
        return found

    @staticmethod
    async def _get(url: str) -> Any:
        async with aiohttp.ClientSession(raise_for_status=True) as session, session.get(url) as response:
            return await response.json()


@asynccontextmanager
async def models(folder: Path) -> AsyncIterator[Models]:
    """A stand-in of one's own; `folder` takes its log."""
    folder.mkdir(parents=True, exist_ok=True)
    port_file = folder / "port"
    port_file.unlink(missing_ok=True)
    process = _start(folder, port_file)

    def told() -> bool:
        assert process.poll() is None, (folder / "models.log").read_text()
        return port_file.exists()

    try:
        await eventually(told, timeout=30)
        yield Models(f"http://127.0.0.1:{port_file.read_text()}")
    finally:
        process.terminate()
        await asyncio.to_thread(process.wait, 10)


def _start(folder: Path, port_file: Path) -> subprocess.Popen[bytes]:
    with (folder / "models.log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.support.models", "--port-file", str(port_file)],
            stdout=log,
            stderr=log,
            cwd=ROOT,
            env={**os.environ, processes.MARKER: processes.marker()},
        )
