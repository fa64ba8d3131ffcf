"""Other systems that do the same work, measured in the same invocation.

A directory of drivers is given, none of it is part of this project. Each driver starts its own server, measures it and
prints one line of JSON with `peer`, `workload` and its figures; which of them belong to a workload is told here.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.report import QUIET_CORES
from benchmarks.runs import Options, Say

_TRIES = 3
_TIMEOUT_SECONDS = 180.0


def commands(workload: str, *, quick: bool) -> list[list[str]]:
    """The command lines of the drivers for a workload of ours. Pure."""
    seconds = ["--seconds", "1" if quick else "4"]
    if workload == "append":
        shape = ["--concurrency", "64", *seconds]
        names = ("jetstream-sync-always", "jetstream-default", "postgres-transaction", "durable-streams")
        return [["append.py", mode, "--peer", name, *shape] for mode in ("spread", "hot") for name in names]
    if workload == "replay":
        events = ["--events", "10000" if quick else "100000"]
        names = ("jetstream", "postgres", "valkey-streams", "durable-streams")
        return [["replay.py", "--peer", name, *events] for name in names]
    live = ("nats", "valkey-pubsub", "valkey-streams", "grpc-naive")
    processes = ["--reader-processes", "2"]
    if workload == "sessions":
        shape = ["--sessions", "20" if quick else "200", "--readers", "1", *processes, *seconds]
        return [["live.py", "many_sessions", "--peer", name, *shape] for name in live]
    steady = ["--readers", "50" if quick else "500", *processes, *seconds]
    # All frames at once: at this rate each one is late as soon as the first one was sent.
    frames = 500 if quick else 10_000
    burst = ["--readers", "20" if quick else "100", "--rate", str(frames * 1000), "--seconds", "0.001", *processes]
    return [
        *(["live.py", "fanout", "--peer", name, *steady] for name in live),
        *(["live.py", "fanout", "--peer", name, *burst] for name in live),
    ]


async def run(workload: str, options: Options, say: Say) -> list[dict[str, Any]]:
    """The lines of all drivers of a workload; what failed has `error` instead of figures."""
    lines: list[dict[str, Any]] = []
    if options.peers is None:
        return lines
    for command in commands(workload, quick=options.quick):
        say(f"peer: {' '.join(command)}")
        best: dict[str, Any] = {}
        for _ in range(_TRIES):
            if options.patience:
                await machine.wait_until_quiet(QUIET_CORES / 2, options.patience)
            line = await _run_one(options.peers, options.peers_python or sys.executable, command)
            if not best or line["others_cores"] < best["others_cores"]:
                best = line
            if best["others_cores"] <= QUIET_CORES:
                break
        lines.append(best)
    return lines


def figure(lines: Sequence[Mapping[str, Any]], peer: str, workload: str, name: str, **params: object) -> float:
    """A figure of one peer's line (the line with these `params`); infinity when it was not measured. Pure."""
    for line in lines:
        same = all(line.get("params", {}).get(key) == value for key, value in params.items())
        if line.get("peer") == peer and line.get("workload") == workload and same and name in line:
            return float(line[name])
    return float("inf")


async def _run_one(directory: Path, python: str, command: Sequence[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with machine.measured({}) as usage:
        process = await asyncio.create_subprocess_exec(
            python,
            str(directory / command[0]),
            *command[1:],
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            cwd=directory,
            # Nothing is to be written beside the drivers.
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )
        try:
            async with asyncio.timeout(_TIMEOUT_SECONDS):
                output, errors = await process.communicate()
        except TimeoutError:
            output, errors = b"", f"not done after {_TIMEOUT_SECONDS:.0f} s".encode()
        finally:
            if process.returncode is None:
                # It stops its server by itself when told to end.
                process.terminate()
                await process.wait()
        text = output.decode("utf-8", "replace").strip()
        if process.returncode == 0 and text:
            found = json.loads(text.splitlines()[-1])
        else:
            found = {"error": errors.decode("utf-8", "replace").strip().rpartition("\n")[2]}
    return {**found, "command": list(command), "others_cores": round(usage.others_cores, 3)}
