"""One fuzz run against a stack of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.gauges import Watch
from tests.fuzz.messages import PROJECT, SESSIONS
from tests.support.cli import SERVICES, Hearth, running

# Sandboxes and agents of the sessions that are there go soon, so that what stays is what was forgotten.
_ENVIRONMENT = {
    "HEARTH_LOCAL_WARM_WINDOW": "1",
    "HEARTH_STOP_WINDOW": "1",
    "HEARTH_APPROVAL_WINDOW": "1",
}
_SLACK = 12
_QUIET_SECONDS = 90.0


@dataclass(frozen=True, slots=True)
class Found:
    """What a run found: how each RPC was answered, what went wrong, memory at the end and its growth."""

    answers: Counter[tuple[str, str]]
    problems: list[str]
    memory: dict[str, float]
    slopes: dict[str, float]


async def fuzz(root: Path, *, seed: int, seconds: float, workers: int) -> Found:
    """Fuzz for `seconds` and wait until the stack is quiet."""
    async with running(root, _ENVIRONMENT) as hearth:
        for session in SESSIONS:
            sent = await hearth.run("send", session, "hello", "--project", PROJECT, "--wait")
            assert sent.code == 0, sent.stderr
        return await _fuzz(hearth, seed, seconds, workers)


async def _fuzz(hearth: Hearth, seed: int, seconds: float, workers: int) -> Found:
    record = json.loads((hearth.root / "stack.json").read_text())
    pages = {entry["name"]: entry["metrics"] for entry in record["processes"]}
    pids = {name: pid for name, pid in hearth.pids().items() if name in SERVICES}
    watch = Watch(pids, pages)
    fuzzer = Fuzzer(hearth.addresses(), seed)
    # Connections to the stores that are opened once, and caches that fill once, are no growth.
    await fuzzer.run(min(20.0, seconds / 5), workers)
    baseline = await watch.held()
    following = asyncio.create_task(watch.follow())
    try:
        await fuzzer.run(seconds, workers)
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError, psutil.NoSuchProcess):
            await following
    problems = list(fuzzer.defects)
    problems += [f"{name} has died" for name, pid in pids.items() if not psutil.pid_exists(pid)]
    problems += await watch.back_to(baseline, slack=_SLACK, seconds=_QUIET_SECONDS)
    for name in SERVICES:
        log = (hearth.root / "logs" / f"{name}.log").read_text(errors="replace")
        problems += [f"{name} logged: {line[:3000]}" for line in log.splitlines() if _is_defect(line)]
    memory = {name: points[-1][1] for name, points in watch.memory.items()}
    return Found(fuzzer.answers, problems, memory, watch.slopes(seconds / 2))


def _is_defect(line: str) -> bool:
    if '"message": "ExecuteBatchError raised in core' in line and "/services/" not in line:
        # How gRPC itself tells that a caller left while its answer was sent. No code of ours is in its stack.
        return False
    return "failed by a defect" in line or "Traceback" in line or "never retrieved" in line
