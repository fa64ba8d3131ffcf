"""The `hearth` program as a user runs it: a process, its output, its exit code."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support import processes

PROGRAM = Path(sys.executable).parent / "hearth"
SECONDS = 60.0
# Six processes, one after the other, where the machine has other things to do.
UP_SECONDS = 240.0
SERVICES = ("pool", "history", "relay", "sandbox")


@dataclasses.dataclass(frozen=True, slots=True)
class Finished:
    """What a run of the program left: both streams as text."""

    code: int
    stdout: str
    stderr: str

    def json(self) -> Any:
        """The one JSON object that `--json` promises."""
        assert self.code == 0, f"exit code {self.code}\n{self.stdout}\n{self.stderr}"
        return json.loads(self.stdout)

    def lines(self) -> list[Any]:
        """One JSON object a line."""
        assert self.code == 0, f"exit code {self.code}\n{self.stdout}\n{self.stderr}"
        return [json.loads(line) for line in self.stdout.splitlines()]


@dataclasses.dataclass(slots=True)
class Following:
    """A `hearth watch --json` that runs: its items as they arrive, each with the time of its arrival."""

    process: asyncio.subprocess.Process
    items: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    arrived: list[float] = dataclasses.field(default_factory=list)
    changed: asyncio.Condition = dataclasses.field(default_factory=asyncio.Condition)

    async def read(self) -> None:
        """Take items until the program ends."""
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            async with self.changed:
                self.items.append(json.loads(line))
                self.arrived.append(time.monotonic())
                self.changed.notify_all()

    async def until(self, condition: Any, seconds: float = SECONDS) -> None:
        """Wait until `condition(items)` holds."""
        async with asyncio.timeout(seconds), self.changed:
            await self.changed.wait_for(lambda: condition(self.items))


class Hearth:
    """The program against one stack, which lives below `root`; called in `directory`."""

    def __init__(
        self, root: Path, environment: Mapping[str, str] | None = None, *, directory: Path | None = None
    ) -> None:
        self.root = root
        self.directory = directory
        # By the marker the end of the test run finds what `hearth down` left, sandboxes included.
        own = {processes.MARKER: processes.marker(), "HEARTH_LOCAL_INHERIT": processes.MARKER}
        self.environment = {
            **os.environ,
            **own,
            "HEARTH_ROOT": str(root),
            "NO_COLOR": "1",
            **(environment or {}),
        }

    async def run(self, *arguments: str, stdin: str = "", seconds: float = SECONDS) -> Finished:
        """Run one command to its end."""
        process = await asyncio.create_subprocess_exec(
            PROGRAM,
            *arguments,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=self.environment,
            cwd=self.directory,
        )
        try:
            async with asyncio.timeout(seconds):
                stdout, stderr = await process.communicate(stdin.encode())
        except TimeoutError:
            process.kill()
            await process.wait()
            raise
        assert process.returncode is not None
        return Finished(process.returncode, stdout.decode(), stderr.decode())

    async def up(self, *options: str) -> Finished:
        """Start the stack on free ports."""
        ports = (part for name in SERVICES for part in (f"--{name}-port", "0"))
        return await self.run("up", "--json", *ports, *options, seconds=UP_SECONDS)

    def addresses(self) -> dict[str, str]:
        """host:port by service, from the record of the stack."""
        record = json.loads((self.root / "stack.json").read_text())
        return {entry["name"]: entry["address"] for entry in record["processes"]}

    def pids(self) -> dict[str, int]:
        """Process id by part, from the record of the stack."""
        record = json.loads((self.root / "stack.json").read_text())
        return {entry["name"]: entry["pid"] for entry in record["processes"]}

    @contextlib.asynccontextmanager
    async def watching(self, session: str, *arguments: str) -> AsyncIterator[Following]:
        """A `hearth watch --json` beside the body."""
        process = await asyncio.create_subprocess_exec(
            PROGRAM,
            *("watch", session, "--json", *arguments),
            stdout=asyncio.subprocess.PIPE,
            env=self.environment,
            limit=8 * 1024 * 1024,
        )
        following = Following(process)
        reading = asyncio.create_task(following.read())
        try:
            yield following
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            await process.wait()
            await reading


@contextlib.asynccontextmanager
async def running(
    root: Path, environment: Mapping[str, str] | None = None, options: Sequence[str] = ()
) -> AsyncIterator[Hearth]:
    """A stack of its own below `root`, with these options of `hearth up`, stopped at the end."""
    root.mkdir(parents=True, exist_ok=True)
    hearth = Hearth(root, environment)
    started = await hearth.up(*options)
    assert started.code == 0, started.stderr
    try:
        yield hearth
    finally:
        stopped = await hearth.run("down")
        assert stopped.code == 0, stopped.stderr
