"""A stand-in in a process of its own, steered over its admin API: for runs whose own loop must stay free."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from tests.support.daytona import checks
from tests.support.daytona.faults import Fault, to_json
from tests.support.daytona.journal import Entry

_ROOT = Path(__file__).resolve().parents[3]
_START_SECONDS, _STOP_SECONDS = 30.0, 30.0
_POLL_SECONDS = 0.02


class RemoteStandIn:
    """A stand-in that serves elsewhere. Its times are monotonic ones of this machine, so they compare with ours."""

    def __init__(self, url: str, api_key: str, admin: str, http: aiohttp.ClientSession) -> None:
        self.url = url
        self.api_key = api_key
        self._admin = admin
        self._http = http

    async def state(self) -> Mapping[str, Any]:
        """Counts, sandboxes, usage, overlaps: as `admin` describes it."""
        found: Mapping[str, Any] = await self._call("GET", "state")
        return found

    async def running(self) -> int:
        """How many sandboxes cost processor and memory now."""
        return int((await self.state())["running"])

    async def log(self, after: int = 0, kind: str = "") -> Sequence[Entry]:
        """Entries with a number above `after`, of one kind or of all."""
        return [Entry(**entry) for entry in await self._call("GET", f"log?after={after}&kind={kind}")]

    async def overlaps(self) -> Sequence[checks.Overlap]:
        """Where two sandboxes of one session accepted harness traffic at once; there must be none."""
        return checks.overlaps(await self.log(), time.monotonic())

    async def add_fault(self, fault: Fault) -> None:
        """Switch a fault on."""
        await self._call("POST", "faults", to_json(fault))

    async def everything(self, probability: float, *, seed: int = 1, seconds: float = 1.0) -> None:
        """Switch every fault on, as `Faults.everything`."""
        await self._call("POST", "faults", {"everything": probability, "seed": seed, "seconds": seconds})

    async def fault_counts(self) -> Mapping[str, int]:
        """How often each fault fired, as `Faults.counts`."""
        counts: Mapping[str, int] = (await self._call("GET", "faults"))["counts"]
        return counts

    async def clear_faults(self) -> None:
        """Switch all faults off."""
        await self._call("DELETE", "faults")

    async def release(self) -> None:
        """Let every stuck transition go on."""
        await self._call("POST", "release")

    async def kill(self, sandbox: str) -> None:
        """Let a sandbox, by id or name, die as a machine does."""
        await self._call("POST", f"kill/{sandbox}")

    async def _call(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        async with self._http.request(method, f"{self._admin}/{path}", json=body) as response:
            answer = await response.json()
            assert response.status == 200, answer
            return answer


@asynccontextmanager
async def started(
    directory: Path, *arguments: str, env: Mapping[str, str] | None = None
) -> AsyncIterator[RemoteStandIn]:
    """Start the program with these arguments (`--delays measured` …) and end it when the context ends."""
    directory.mkdir(parents=True, exist_ok=True)
    address_file = directory / "address"
    address_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "tests.support.daytona", "--directory", str(directory)]
    with (directory / "stand_in.log").open("ab") as log:
        process = await asyncio.to_thread(
            subprocess.Popen,
            [*command, "--address-file", str(address_file), *arguments],
            cwd=_ROOT,
            env=dict(env) if env is not None else None,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        async with asyncio.timeout(_START_SECONDS):
            while not address_file.exists():
                assert process.poll() is None, (directory / "stand_in.log").read_text()
                await asyncio.sleep(_POLL_SECONDS)
        given = json.loads(address_file.read_text())
        async with aiohttp.ClientSession() as http:
            yield RemoteStandIn(given["url"], given["api_key"], given["admin"], http)
    finally:
        process.terminate()
        try:
            await asyncio.to_thread(process.wait, _STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
