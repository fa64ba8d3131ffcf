"""Random traffic of many sessions on Daytona while everything there goes wrong now and then, and what must hold.

The four services are real, and so is the SDK. Daytona is its stand-in, in a process of its own, whose sandboxes are
processes on this machine with the scripted agent behind agentd. The stand-in's own journal is the judge of what ran and
what took traffic; the logs of the sessions tell what became of the inputs. Nothing here depends on how fast it is.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks import traffic_verdicts, warm_turns
from benchmarks.figures import Figures
from benchmarks.report import Report, Target, least, most
from benchmarks.rig import Rig
from benchmarks.runs import Options, Part, Say, once
from benchmarks.traffic_people import Diary, Habits, use
from hearth.cli.stand_in import AGENTD
from hearth.client import Client
from hearth.paging import CALL_SECONDS
from hearth.sandbox.v1 import sandbox_service_pb2
from tests.support.daytona import checks, remote
from tests.support.daytona.processes import MARKER
from tests.support.daytona.remote import RemoteStandIn

WORKLOAD = "traffic"
_FAULTY = 0.05
_LEAST_FIRED = 20
_LOOK_SECONDS = 0.5


@dataclass(frozen=True, slots=True)
class Shape:
    """How much traffic. `seconds`: at least, and up to twice that until every kind of fault has fired `fired` times.
    `settle`: seconds after its end by which nothing may run; it is looked at until then, or until it was so for `calm`
    seconds."""

    sessions: int = 100
    cap: int = 20
    window: float = 10.0
    seconds: float = 180.0
    seed: int = 1
    at_once: int = 24
    fired: int = _LEAST_FIRED
    settle: float = 60.0
    calm: float = 60.0
    faulty: float = _FAULTY


SMALL = Shape(sessions=10, cap=2, window=2.0, seconds=20.0, at_once=5, fired=0, calm=3.0)


@dataclass(slots=True)
class Watched:
    """What was seen of slots while traffic went on."""

    slots: int = 0
    orphans: int = 0


async def run(options: Options, say: Say) -> Report:
    """The whole run. `--quick`: few sessions and little time."""
    shape = SMALL if options.quick else Shape(seconds=options.minutes * 60)
    shape = replace(shape, seed=options.seed)
    say(f"seed {shape.seed}")
    report = Report(WORKLOAD, asdict(shape))
    await once(report, f"{shape.sessions} sessions for {shape.seconds:.0f} s", lambda: measure(shape, say), say)
    report.targets = targets(report.figures, shape)
    return report


def targets(figures: Figures, shape: Shape) -> list[Target]:
    """What must hold."""
    return [
        most(figures, "overlaps", 0, "times two sandboxes of a session took traffic"),
        most(figures, "parked_most", shape.cap, "sandboxes parked running"),
        most(figures, "slots_most", shape.cap, "warm slots in use"),
        most(figures, "running_after", 0, f"sandboxes running {shape.settle:.0f} s after"),
        most(figures, "processes_left", 0, "processes"),
        least(figures, "fired_least", shape.fired, "times that each kind of fault fired"),
        # A cap that nothing presses against is kept by anything.
        Target("cap_reached", figures.get("slots_most", 0), shape.cap if shape.fired else 0, "warm slots in use"),
    ]


async def measure(shape: Shape, say: Say, keep_logs: Path | None = None) -> Part:
    """One run. `keep_logs`: a directory to which the logs of the services go when something was wrong."""
    async with Rig() as rig, remote.started(rig.directory / "daytona", env=_environment(rig)) as stand_in:
        try:
            async with warm_turns.house(rig, **_settings(rig, stand_in, shape)) as house:
                try:
                    part = await _traffic(house.client, stand_in, shape, say)
                finally:
                    # While there still is a Daytona for them.
                    for service in reversed(list(house.services.values())):
                        await service.stop()
            ids = {entry.sandbox for entry in await stand_in.log(kind="state")}
            part.figures["processes_left"] = len(await asyncio.to_thread(_processes_of, ids))
            if keep_logs is not None:
                await asyncio.to_thread(_keep, rig.directory, keep_logs)
                journal = [f"{entry}\n" for entry in await stand_in.log()]
                (keep_logs / "journal.txt").write_text("".join(journal))
        except BaseException:
            if keep_logs is not None:
                _keep(rig.directory, keep_logs)
            raise
    return part


async def _traffic(client: Client, stand_in: RemoteStandIn, shape: Shape, say: Say) -> Part:
    diary, watched = Diary(), Watched()
    watching = asyncio.create_task(_watch(client, watched))
    began = time.monotonic()
    await stand_in.everything(shape.faulty, seed=shape.seed, seconds=1.0)

    async def enough() -> None:
        await asyncio.sleep(shape.seconds)
        while time.monotonic() < began + 2 * shape.seconds:
            if min(traffic_verdicts.fired(await stand_in.fault_counts()).values()) >= shape.fired:
                return
            await asyncio.sleep(_LOOK_SECONDS)

    habits = Habits(window=shape.window, at_once=shape.at_once)
    await use(client, diary, habits, people=shape.sessions, seed=shape.seed, enough=enough)
    ended = time.monotonic()
    say(f"traffic ended after {ended - began:.0f} s: {dict(diary.acts)}")
    # Faults go on meanwhile.
    zero_at, running = await _until_nothing_runs(stand_in, ended + shape.settle, shape.calm)
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)

    entries, now = list(await stand_in.log()), time.monotonic()
    faults = [entry for entry in entries if entry.kind == "fault"]
    counts = await stand_in.fault_counts()
    say("faults: " + ", ".join(f"{name} {count}" for name, count in counts.items() if "/" in name))
    problems = [*diary.problems]
    for story in diary.stories:
        problems += traffic_verdicts.check_story(story, faults)
    overlaps = checks.overlaps(entries, now)
    problems += [f"two sandboxes at once: {overlap}" for overlap in overlaps]
    usage = checks.usage(entries, now)
    fired = traffic_verdicts.fired(counts)
    figures: Figures = {
        "traffic_s": ended - began,
        "sessions": len(diary.stories),
        "deleted": sum(story.deleted for story in diary.stories),
        "inputs": sum(len(story.accepted) for story in diary.stories),
        **traffic_verdicts.outcomes(diary.stories),
        **{f"act_{act.replace(' ', '_')}": count for act, count in sorted(diary.acts.items())},
        **fired,
        "fired_least": min(fired.values()),
        "overlaps": len(overlaps),
        "parked_most": checks.most_at_once(traffic_verdicts.parked(entries, now)),
        "slots_most": watched.slots,
        "orphans_most": watched.orphans,
        "running_most": checks.most_at_once(checks.charged(entries, now)),
        "running_after": running,
        "nothing_runs_after_s": zero_at - ended,
        "dollars": usage.dollars(),
        "running_hours": usage.running / 3600,
    }
    return Part(figures, problems=problems)


async def _watch(client: Client, watched: Watched) -> None:
    """Look again and again how many warm slots are in use."""
    while True:
        usage = await client.sandboxes.GetUsage(sandbox_service_pb2.GetUsageRequest(), timeout=CALL_SECONDS)
        watched.slots = max([watched.slots, *(slot.used for slot in usage.slots)])
        watched.orphans = max(watched.orphans, usage.orphans)
        await asyncio.sleep(_LOOK_SECONDS)


async def _until_nothing_runs(stand_in: RemoteStandIn, until: float, calm: float) -> tuple[float, int]:
    """When the last sandbox ended, and how many run at `until`, or once none did for `calm` seconds."""
    zero_at = time.monotonic()
    while True:
        running = await stand_in.running()
        if running:
            zero_at = time.monotonic()
        if time.monotonic() >= min(until, zero_at + calm):
            return zero_at, running
        await asyncio.sleep(_LOOK_SECONDS)


def _settings(rig: Rig, stand_in: RemoteStandIn, shape: Shape) -> dict[str, str]:
    return {
        "HEARTH_PROVIDERS": "daytona",
        "HEARTH_DEFAULT_PROVIDER": "daytona",
        "HEARTH_DAYTONA_API_URL": stand_in.url,
        "HEARTH_DAYTONA_API_KEY": stand_in.api_key,
        "HEARTH_DAYTONA_DAEMON": json.dumps(AGENTD),
        "HEARTH_DAYTONA_MOUNT": str(rig.directory / "mounts"),
        "HEARTH_DAYTONA_WARM_CAP": str(shape.cap),
        "HEARTH_DAYTONA_WARM_WINDOW": str(shape.window),
        "HEARTH_STOP_WINDOW": str(shape.window),
        # A prompt that was lost on its way is noticed by nothing else.
        "HEARTH_FIRST_RESPONSE_LIMIT": "8",
        "HEARTH_OPEN_TIMEOUT": "15",
    }


def _environment(rig: Rig) -> dict[str, str]:
    # By this variable the next benchmark finds what one that was killed has left.
    return {**os.environ, "HEARTH_ADDRESS_FILE": str(rig.directory / "daytona.address")}


def _processes_of(sandboxes: Iterable[str]) -> list[int]:
    """The processes of this machine that belong to one of these sandboxes."""
    marks = {f"{MARKER}={sandbox}".encode() for sandbox in sandboxes}
    found = []
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            with suppress(OSError):
                if marks & set(Path(entry.path, "environ").read_bytes().split(b"\0")):
                    found.append(int(entry.name))
    return found


def _keep(directory: Path, where: Path) -> None:
    where.mkdir(parents=True, exist_ok=True)
    for log in [*directory.glob("*.log"), *directory.glob("daytona/*.log")]:
        (where / log.name).write_bytes(log.read_bytes())
