"""How each fault of a plan is done to a house, and when it is over."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from hearth.channel import open_channel
from hearth.relay.v1 import relay_pb2, relay_service_pb2, relay_service_pb2_grpc
from hearth.types.v1 import session_pb2
from tests.checkers.verdict import Verdict
from tests.faults.crowd import Crowd
from tests.faults.house import House
from tests.faults.load import PROJECT
from tests.faults.plan import Fault
from tests.support import events
from tests.support.processes import MARKER, marker
from tests.support.recording import Key, Publish
from tests.support.relay_turns import text_frame
from tests.support.waiting import eventually

# More than the largest answer, less than what comes back in a second.
_CUT_BYTES = 1_500
_STALE_CALL_SECONDS = 2.0
_SPILL_SECONDS = 60.0
_SUPERSEDED_SECONDS = 60.0
_FILE_LIMIT_BYTES = 3_000_000
_TAKEN = frozenset({relay_pb2.PUBLISH_OUTCOME_ACCEPTED, relay_pb2.PUBLISH_OUTCOME_CONFLICT})


@dataclass
class Starved:
    """A run whose file could not grow: how much was taken of it, why no more, and when it was over."""

    key: Key
    taken: int
    refused: str
    ended_at: float = 0.0


@dataclass
class Happenings:
    """Does faults, one after the other, and keeps what has to be known of them at the end."""

    house: House
    crowd: Crowd
    say: Callable[[str], None]
    outages: list[tuple[float, float]] = field(default_factory=list)
    stale: Verdict = field(default_factory=Verdict)
    stale_frames: list[Publish] = field(default_factory=list)
    starved: list[Starved] = field(default_factory=list)
    # From when to when what was acknowledged is lost with the database.
    copied_at: float = 0.0
    restored_at: float = 0.0

    async def happen(self, fault: Fault) -> None:
        """Return when the fault is over and everything runs again. Whether it works is for others to see."""
        began = time.monotonic()
        try:
            await getattr(self, f"_{fault.kind.replace('-', '_')}")(fault)
        finally:
            self.outages.append((began, time.monotonic()))

    async def _kill(self, fault: Fault) -> None:
        if fault.targets == ("producer",):
            await self._kill_producer(fault)
            return
        chance = random.Random(fault.pick)
        targets = list(fault.targets)
        chance.shuffle(targets)
        for target in targets:
            await self.house.kill(target, fault.pick)
            await asyncio.sleep(chance.choice([0.0, 0.05, 0.3]))
        await asyncio.sleep(fault.seconds)
        chance.shuffle(targets)
        starting = []
        for target in targets:
            starting.append(self.house.launch(target, fault.pick))
            await asyncio.sleep(chance.choice([0.0, 0.2, 1.0]))
        await asyncio.gather(*starting)

    async def _kill_producer(self, fault: Fault) -> None:
        load = self.crowd.loads[fault.pick % len(self.crowd.loads)]
        await load.kill()
        assert os.listdir(load.spill) == [], "a kill leaves no file"
        await asyncio.sleep(fault.seconds)
        await self.crowd.restart(load)

    async def _cut(self, fault: Fault) -> None:
        """Cut all connections of a link again and again, in the middle of what comes back or at any time."""
        (link,) = fault.targets
        cutter = self.house.cutters[link]
        chance = random.Random(fault.pick)
        ends = time.monotonic() + fault.seconds
        before = cutter.connections
        while time.monotonic() < ends:
            if chance.random() < 0.7:
                cutter.cut_after = chance.randint(1, _CUT_BYTES)
            else:
                cutter.cut()
            await asyncio.sleep(chance.uniform(0.05, 0.4))
        cutter.cut_after = None
        self.say(f"    {cutter.connections - before} connections came anew")

    async def _freeze(self, fault: Fault) -> None:
        (service,) = fault.targets
        replica = self.house.replica(service, fault.pick)
        replica.freeze()
        try:
            await asyncio.sleep(fault.seconds)
        finally:
            replica.thaw()

    async def _flush(self, fault: Fault) -> None:
        """FLUSHALL while a producer that was superseded long ago publishes without a pause."""
        key, execution = await self._superseded(fault.pick)
        publishing = asyncio.create_task(self._publish_stale(key, execution, fault.seconds))
        for _ in range(3):
            await asyncio.sleep(fault.seconds / 4)
            await self.house.flush()
        self.say(f"    {await publishing} times a frame of epoch {execution.epoch} was published to {key[1]}")

    async def _superseded(self, pick: int) -> tuple[Key, session_pb2.ExecutionRef]:
        """A session, and an execution of it that was followed by several others."""
        await eventually(self._repeated, _SUPERSEDED_SECONDS)
        found = self._repeated()
        key = sorted(found)[pick % len(found)]
        execution_id, epoch = self.crowd.told().runs[key][0]
        return key, session_pb2.ExecutionRef(execution_id=execution_id, epoch=epoch)

    def _repeated(self) -> list[Key]:
        return [key for key, runs in self.crowd.told().runs.items() if len(runs) > 3]

    async def _publish_stale(self, key: Key, execution: session_pb2.ExecutionRef, seconds: float) -> int:
        ends = time.monotonic() + seconds
        count = 0
        async with open_channel(self.house.relay) as channel:
            stub = relay_service_pb2_grpc.RelayServiceStub(channel)
            while time.monotonic() < ends:
                count += 1
                batch = relay_pb2.FrameBatch(
                    session=session_pb2.SessionKey(project=key[0], session=key[1]),
                    execution_id=execution.execution_id,
                    epoch=execution.epoch,
                    frames=[text_frame(100_000 + count, "stale", "stale")],
                )
                publish = Publish(key, execution.execution_id, execution.epoch, batch.frames)
                self.stale_frames.append(publish)
                publish.result = await _publish(stub, batch)
                if publish.result is not None:
                    outcome = publish.result.outcome
                    self.stale.expect(
                        outcome not in _TAKEN,
                        f"{key[1]}: a frame of epoch {execution.epoch} was answered"
                        f" {relay_pb2.PublishOutcome.Name(outcome)}",
                    )
                await asyncio.sleep(0.002)
        return count

    async def _disk_full(self, fault: Fault) -> None:
        """All of history is away while a run writes more than its file may hold."""
        for number in range(len(self.house.histories)):
            await self.house.kill("history", number)
        session, execution = events.key(project=PROJECT), events.new_id()
        spill = self.house.directory / f"starved-{fault.pick}"
        spill.mkdir()
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.support.spilling_producer", "--history", self.house.history, "--directory", str(spill)),
            *("--session", session.session, "--project", PROJECT, "--execution", execution, "--count", "5000"),
            *("--size", "5000", "--memory", "200000", "--file-limit", str(_FILE_LIMIT_BYTES)),
            stdout=asyncio.subprocess.PIPE,
            env={**os.environ, MARKER: marker()},
        )
        assert process.stdout is not None
        try:
            async with asyncio.timeout(_SPILL_SECONDS):
                said = json.loads(await process.stdout.readline())
                self.starved.append(Starved((PROJECT, session.session), said["taken"], said["refused"]))
                self.say(f"    {said['taken']} events taken, then: {said['refused']}")
                await asyncio.sleep(fault.seconds)
                starting = [self.house.launch("history", number) for number in range(len(self.house.histories))]
                await asyncio.gather(*starting)
                await process.stdout.read()
                assert await process.wait() == 0
                self.starved[-1].ended_at = time.monotonic()
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        assert _empty(spill)

    def is_lost(self, at: float) -> bool:
        """Whether what was acknowledged at that time is lost with the database."""
        return self.copied_at <= at <= self.restored_at

    async def _copy(self, fault: Fault) -> None:
        self.copied_at = time.monotonic()
        await self.house.copy_database()

    async def _restore(self, fault: Fault) -> None:
        again = random.Random(fault.pick).random() < 0.5
        if again:
            for number in range(len(self.house.histories)):
                await self.house.kill("history", number)
        await self.house.restore_database()
        if again:
            starting = [self.house.launch("history", number) for number in range(len(self.house.histories))]
            await asyncio.gather(*starting)
        self.restored_at = time.monotonic()
        self.say(f"    history {'was started anew' if again else 'went on'}")


async def _publish(
    stub: relay_service_pb2_grpc.RelayServiceAsyncStub, batch: relay_pb2.FrameBatch
) -> relay_pb2.PublishResult | None:
    """The answer to one batch on a stream of its own; None when there was none."""
    call = stub.Publish(timeout=_STALE_CALL_SECONDS)
    try:
        await call.write(relay_service_pb2.PublishRequest(number=1, batches=[batch]))
        await call.done_writing()
        response = await call.read()
    except (grpc.aio.AioRpcError, grpc.aio.InternalError, asyncio.InvalidStateError):
        return None
    return response.results[0] if isinstance(response, relay_service_pb2.PublishResponse) else None


def _empty(directory: Path) -> bool:
    return os.listdir(directory) == []
