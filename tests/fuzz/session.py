"""One fuzz run against a stack of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.fuzz import callers, http
from tests.fuzz.fuzzer import Fuzzer
from tests.fuzz.gauges import Watch
from tests.fuzz.messages import PROJECT, SESSIONS
from tests.fuzz.tls import MODES, Tls
from tests.support.cli import SERVICES, Hearth, running
from tests.support.harness import SCRIPTED_AGENT, HarnessDaemon, agentd

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
    """What a run found: how each RPC was answered, what of that gRPC said itself, what else was sent, what went wrong,
    memory in MiB at the end and how much more of it is kept each minute."""

    answers: Counter[tuple[str, str]]
    of_grpc: Counter[str]
    attacks: Counter[str]
    problems: list[str]
    memory: dict[str, float]
    slopes: dict[str, float]


def mode(seed: int) -> Sequence[str]:
    """The options of `hearth up` that a seed stands for."""
    return MODES[seed % len(MODES)]


async def fuzz(root: Path, *, seed: int, seconds: float, workers: int) -> Found:
    """Fuzz for `seconds` and wait until the stack is quiet."""
    root.mkdir(parents=True, exist_ok=True)
    auth = root / "tokens.json"
    auth.write_text(json.dumps(callers.tokens()))
    async with (
        running(root, _ENVIRONMENT | callers.environment(str(auth)), mode(seed)) as hearth,
        agentd({"scripted": SCRIPTED_AGENT}, root / "home") as daemon,
    ):
        for session in SESSIONS:
            sent = await hearth.run("send", session, "hello", "--project", PROJECT, "--wait")
            assert sent.code == 0, sent.stderr
        return await _fuzz(hearth, daemon, seed, seconds, workers)


async def _fuzz(hearth: Hearth, daemon: HarnessDaemon, seed: int, seconds: float, workers: int) -> Found:
    record = json.loads((hearth.root / "stack.json").read_text())
    pages = {entry["name"]: entry["metrics"] for entry in record["processes"]}
    pids = {name: pid for name, pid in hearth.pids().items() if name in SERVICES}
    watch = Watch(pids, pages)
    asked = [http.metrics_page(name, pages[name]) for name in SERVICES]
    asked += [http.daemon(daemon.url.removeprefix("http://"), daemon.token)] * len(asked)
    addresses = {name: address for name, address in hearth.addresses().items() if name in SERVICES}
    fuzzer = Fuzzer(addresses, asked, seed, Tls.of_record(record.get("tls")))
    # Connections to the stores that are opened once, and caches that fill once, are no growth.
    await fuzzer.run(min(20.0, seconds / 5), workers)
    baseline = await watch.held()
    following = asyncio.create_task(watch.follow())
    try:
        # What fills megabytes for a moment comes first: beside it nobody would see small things being forgotten, and
        # what it leaves behind stays. It ends before memory is looked at: its end is no fall that hides a rise.
        await fuzzer.run(seconds * 0.4, workers)
        await fuzzer.run(seconds * 0.6, workers, large=False)
    finally:
        following.cancel()
        with contextlib.suppress(asyncio.CancelledError, psutil.NoSuchProcess):
            await following
    problems = list(fuzzer.problems)
    problems += [f"{name} has died" for name, pid in pids.items() if not psutil.pid_exists(pid)]
    problems += await watch.back_to(baseline, slack=_SLACK, seconds=_QUIET_SECONDS)
    if daemon.process.poll() is not None:
        problems.append("agentd has died")
    logs = {name: (hearth.root / "logs" / f"{name}.log").read_text(errors="replace") for name in SERVICES}
    for name, log in (logs | {"agentd": daemon.log()}).items():
        problems += [f"{name} logged: {line[:3000]}" for line in log.splitlines() if _is_defect(line)]
    memory = {name: points[-1][1] for name, points in watch.memory.items()}
    return Found(fuzzer.answers, fuzzer.of_grpc, fuzzer.attacks, problems, memory, watch.slopes(seconds / 2))


def _is_defect(line: str) -> bool:
    if '"message": "ExecuteBatchError raised in core' in line and "/services/" not in line:
        # How gRPC itself tells that a caller left while its answer was sent. No code of ours is in its stack.
        return False
    return "failed by a defect" in line or "request failed" in line or "Traceback" in line or "never retrieved" in line
