"""The load processes of a round, and what they have written down so far."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.faults.journal import Reading, Told
from tests.faults.load import PROJECT
from tests.support.processes import MARKER, marker
from tests.support.recording import Key

_POLL_SECONDS = 0.05
# How far above all it knows of a load process begins after a kill: more than one can have begun and not told.
_EPOCHS_APART = 100


class Load:
    """One load process: its sessions, its journal, its directory for what waits."""

    def __init__(self, name: str, directory: Path, sessions: int, *, history: str, relay: str, seed: int) -> None:
        self.name = name
        self.keys: list[Key] = [(PROJECT, f"{name}{number}") for number in range(sessions)]
        self.journal = directory / f"{name}.journal"
        self.spill = directory / f"{name}.spill"
        self.spill.mkdir()
        self._log = directory / f"{name}.log"
        self._ready = directory / f"{name}.ready"
        self._history, self._relay, self._seed = history, relay, seed
        self._process: asyncio.subprocess.Process | None = None

    @property
    def running(self) -> bool:
        """Whether it is there."""
        return self._process is not None and self._process.returncode is None

    @property
    def log(self) -> str:
        """What it printed."""
        return self._log.read_text("utf-8", "replace")[-4_000:] if self._log.exists() else ""

    async def start(self, epoch: int = 0) -> None:
        """Start it; its sessions begin above `epoch`."""
        self._ready.unlink(missing_ok=True)
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "tests.faults.load", "--history", self._history, "--relay", self._relay),
                *("--journal", str(self.journal), "--spill", str(self.spill), "--seed", str(self._seed)),
                *("--ready", str(self._ready)),
                *("--sessions", ",".join(session for _, session in self.keys), "--epoch", str(epoch)),
                stdout=log,
                stderr=log,
                env={**os.environ, MARKER: marker()},
            )

    async def kill(self) -> None:
        """kill -9."""
        assert self._process is not None
        self._process.kill()
        await self._process.wait()

    async def finish(self, timeout: float) -> int:
        """Let it end what it began; its exit code. TimeoutError, and it is killed, when that takes too long."""
        assert self._process is not None
        try:
            async with asyncio.timeout(timeout):
                # One that was only just started does not hear the signal yet, and would die of it.
                while self.running:
                    if self._ready.exists():
                        break
                    await asyncio.sleep(_POLL_SECONDS)
                if self.running:
                    self._process.send_signal(signal.SIGTERM)
                return await self._process.wait()
        except TimeoutError:
            await self.kill()
            raise

    async def discard(self) -> None:
        """End it in any way."""
        if self.running:
            await self.kill()


class Crowd:
    """All of them."""

    def __init__(self, loads: Sequence[Load]) -> None:
        self.loads = loads
        self._reading = Reading([load.journal for load in loads])

    @property
    def keys(self) -> list[Key]:
        """Every session."""
        return [key for load in self.loads for key in load.keys]

    def told(self) -> Told:
        """What they wrote down until now."""
        return self._reading.more()

    async def acknowledged(self, more: int, timeout: float) -> None:
        """Return when `more` answers than now were written down; AssertionError when that takes too long."""
        ends = time.monotonic() + timeout
        wanted = self.told().acknowledged + more
        while self.told().acknowledged < wanted:
            for load in self.loads:
                assert load.running, f"load {load.name} ended:\n{load.log}"
            assert time.monotonic() < ends, f"only {self.told().acknowledged} of {wanted} answers after {timeout} s"
            await asyncio.sleep(_POLL_SECONDS)

    async def restart(self, load: Load) -> None:
        """Start one again after a kill."""
        epochs = [run[1] for key in load.keys for run in self.told().runs[key]]
        epochs += [append.event.epoch for append in self.told().appends if append.session in load.keys]
        await load.start(max(epochs, default=0) + _EPOCHS_APART)
