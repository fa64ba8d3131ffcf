"""One round: a house under load, faults by a plan, and at its end every checker over everything that happened."""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import grpc.aio

from hearth.channel import open_channel
from hearth.types.v1 import session_pb2
from tests.checkers import verdicts
from tests.checkers.verdict import Verdict
from tests.faults import restored, story
from tests.faults.crowd import Crowd, Load
from tests.faults.happenings import Happenings
from tests.faults.house import House, house
from tests.faults.plan import Plan
from tests.faults.readers import Audience, Follower
from tests.support import events
from tests.support.history_client import Client
from tests.support.recorder import Recorder
from tests.support.recording import ENDINGS, Key, Log, Recording, runner
from tests.support.relay_reader import reading
from tests.support.relay_turns import Turn

_WARM_EVENTS = 200
_PROGRESS_EVENTS = 40
# Far above what anything of it takes, so that what hangs is told as such.
_PROGRESS_SECONDS = 60.0
_FINISH_SECONDS = 90.0
_CATCH_UP_SECONDS = 60.0
# What is logged as an error while connections are broken on purpose: gRPC does so when a caller is gone.
_EXPECTED_ERRORS = ("ExecuteBatchError raised in core",)

Say = Callable[[str], None]


@dataclass
class Outcome:
    """What a round showed."""

    plan: Plan
    verdicts: dict[str, Verdict] = field(default_factory=dict)
    events: int = 0
    acknowledged: int = 0
    frames: int = 0

    @property
    def wrong(self) -> list[str]:
        """Everything that is wrong, in words."""
        return [f"{name}: {trouble}" for name, verdict in self.verdicts.items() for trouble in verdict.wrong]


async def play(plan: Plan, directory: Path, say: Say, *, sessions: int = 6) -> Outcome:
    """Play a round in an empty directory, which it fills. Raises AssertionError when something hangs."""
    began = time.monotonic()

    def tell(text: str) -> None:
        say(f"{time.monotonic() - began:7.1f} s  {text}")

    async with house(directory, histories=plan.histories, relays=plan.relays) as found:
        tell(f"seed {plan.seed}: {plan.histories} histories, {plan.relays} relays, {len(plan.faults)} faults")
        async with _crowd(plan, found, directory, sessions) as crowd, AsyncExitStack() as stack:
            channels = [
                await stack.enter_async_context(open_channel(address))
                for address in (found.relay, found.relays[-1].address, found.cutters["reader-relay"].address)
            ]
            await crowd.acknowledged(_WARM_EVENTS, _PROGRESS_SECONDS)
            audience = Audience(crowd.keys, channels, random.Random(plan.seed))
            try:
                happenings = Happenings(found, crowd, tell)
                for fault in plan.faults:
                    tell(str(fault))
                    await happenings.happen(fault)
                    await _progress(crowd, audience, happenings)
                return await _settle(plan, found, crowd, audience, happenings, tell)
            finally:
                await audience.end_visits()
                await audience.leave()


@asynccontextmanager
async def _crowd(plan: Plan, found: House, directory: Path, sessions: int) -> AsyncIterator[Crowd]:
    """Load straight to the services, and load through proxies that are cut."""
    cut = {service: found.cutters[f"producer-{service}"].address for service in ("history", "relay")}
    straight = Load("a", directory, sessions, history=found.history, relay=found.relay, seed=plan.seed)
    through = Load("b", directory, sessions, history=cut["history"], relay=cut["relay"], seed=plan.seed)
    crowd = Crowd([straight, through])
    try:
        for load in crowd.loads:
            await load.start()
        yield crowd
    finally:
        for load in crowd.loads:
            await load.discard()


async def _progress(crowd: Crowd, audience: Audience, happenings: Happenings) -> None:
    """What was away is back by itself: writers are answered and readers get events."""
    began = time.monotonic()
    delivered = audience.delivered
    await crowd.acknowledged(_PROGRESS_EVENTS, _PROGRESS_SECONDS)
    while audience.delivered < delivered + _PROGRESS_EVENTS:
        failures = [follower.failure for follower in audience.all if follower.failure]
        assert not failures, "\n".join(failures)
        assert time.monotonic() < began + 2 * _PROGRESS_SECONDS, "readers get nothing any more"
        delivered = min(delivered, audience.delivered)
        await asyncio.sleep(0.05)
    # Until now answers may have taken long.
    begin, _ = happenings.outages[-1]
    happenings.outages[-1] = (begin, time.monotonic())


async def _settle(
    plan: Plan, found: House, crowd: Crowd, audience: Audience, happenings: Happenings, tell: Say
) -> Outcome:
    directory = found.directory
    tell("the load ends what it began")
    await audience.end_visits()
    ended = await asyncio.gather(*(load.finish(_FINISH_SECONDS) for load in crowd.loads))
    for load, code in zip(crowd.loads, ended, strict=True):
        assert code == 0, f"load {load.name} ended with {code}:\n{load.log}"
        assert os.listdir(load.spill) == []
    told = crowd.told()
    recorder = _After(told.ticks)
    recording = recorder.recording
    recording.appends += told.appends
    recording.publishes += [*told.publishes, *happenings.stale_frames]
    recording.outages = happenings.outages
    recording.settled = True
    async with AsyncExitStack() as stack:
        clients = [
            Client(await stack.enter_async_context(open_channel(process.address))) for process in found.histories
        ]
        for key in crowd.keys:
            await _end_all(clients[0], key, recorder)
            recording.logs[key] = await _log(clients, key)
        tell("readers catch up")
        await _catch_up(audience, recording)
        starved = await _starved(clients[0], happenings)
    healed = await _healed(found)
    lost, told_of_it = Recording(), Verdict()
    if happenings.restored_at:
        restored.forget(recording, happenings.copied_at, happenings.restored_at)
        lost, told_of_it = restored.sort(recording, [follower.lives for follower in audience.all])
    else:
        recording.readers += [life for follower in audience.all for life in follower.lives]
    outcome = Outcome(plan, verdicts(recording))
    for name, verdict in verdicts(lost).items():
        outcome.verdicts[name].checked += verdict.checked
        outcome.verdicts[name].wrong += [f"before the restore: {trouble}" for trouble in verdict.wrong]
    outcome.verdicts |= {
        "stale": happenings.stale,
        "starved": starved,
        "healed": healed,
        "restored": told_of_it,
        "readers": _readers(audience.all),
        "errors": _errors(found),
    }
    if outcome.wrong:
        story.write(recording, directory / "story")
        story.write(lost, directory / "story-before")
    outcome.events = sum(log.last for log in recording.logs.values())
    outcome.acknowledged = told.acknowledged
    outcome.frames = sum(len(publish.frames) for publish in told.publishes)
    return outcome


class _After(Recorder):
    """Writes down what comes after everything that journals tell."""

    def __init__(self, ticks: int) -> None:
        super().__init__()
        for _ in range(ticks):
            self._ticks()


async def _end_all(client: Client, key: Key, recorder: Recorder) -> None:
    """As a sweep does: end what has no ending."""
    session = session_pb2.SessionKey(project=key[0], session=key[1])
    begun: dict[str, bool] = {}
    for item in await client.read(session):
        if runner(item.event):
            ended = begun.get(item.event.execution_id, False)
            begun[item.event.execution_id] = ended or item.event.type in ENDINGS
    for execution_id in (execution_id for execution_id, ended in begun.items() if not ended):
        (head,) = await client.heads(session)
        append = recorder.sent(key, events.Run(head.epoch + 1, execution_id).lost())
        (result,) = await client.append(session, append.event)
        recorder.answered(append, result)


async def _log(clients: list[Client], key: Key) -> Log:
    """The log as every replica tells it, which must be the same."""
    session = session_pb2.SessionKey(project=key[0], session=key[1])
    logs = []
    for client in clients:
        (head,) = await client.heads(session)
        logs.append(Log(await client.read(session), await client.quarantined(session), head))
    assert all(log == logs[0] for log in logs), f"replicas tell different logs of {key}"
    return logs[0]


async def _catch_up(audience: Audience, recording: Recording) -> None:
    catching_up = (follower.catch_up(recording.logs[follower.key].last) for follower in audience.staying)
    try:
        async with asyncio.timeout(_CATCH_UP_SECONDS):
            await asyncio.gather(*catching_up)
    except TimeoutError:
        late = [
            f"{follower.key[1]} has {follower.sequence} of {recording.logs[follower.key].last}"
            for follower in audience.staying
            if follower.sequence < recording.logs[follower.key].last
        ]
        raise AssertionError(f"readers did not catch up: {', '.join(late)}") from None


async def _starved(client: Client, happenings: Happenings) -> Verdict:
    """Of a run whose file was full everything that was taken is there, and its ending says that the rest is not."""
    verdict = Verdict()
    for run in happenings.starved:
        if happenings.is_lost(run.ended_at):
            continue
        items = await client.read(session_pb2.SessionKey(project=run.key[0], session=run.key[1]))
        texts = [item.event.message_completed for item in items if item.event.HasField("message_completed")]
        numbers = [int(text.content[0].text.text.split(" ")[0]) for text in texts]
        verdict.expect(numbers == list(range(run.taken)), f"{run.key[1]}: {len(numbers)} of {run.taken} are there")
        verdict.expect("File too large" in run.refused, f"{run.key[1]}: refused for {run.refused!r}")
        manifest = items[-1].event.execution_failed.summary.manifest
        verdict.expect(
            items[-1].event.type == "execution.failed" and manifest.incomplete and bool(manifest.incomplete_reason),
            f"{run.key[1]}: ends with {items[-1].event.type}, incomplete={manifest.incomplete}",
        )
    return verdict


async def _healed(found: House) -> Verdict:
    """Through every relay a new turn is heard whole, frame by frame."""
    verdict = Verdict()
    async with open_channel(found.histories[0].address) as history:
        for relay in found.relays:
            async with open_channel(relay.address) as channel:
                missing = await _heard(history, channel)
            verdict.expect(not missing, f"{relay.address}: frames were lost though nothing was away: {missing}")
    return verdict


async def _heard(history: grpc.aio.Channel, relay: grpc.aio.Channel) -> list[tuple[int, int]]:
    session = events.key(project="healed")
    async with reading(relay, session) as reader:
        await reader.until_ready()
        turn = Turn(history, relay, session)
        await turn.start()
        await turn.say("m", "whole ", "again")
        await turn.complete("m")
        await turn.end()
        await reader.until_type("execution.completed")
    return reader.gaps if reader.text("m") == "whole again" else [(0, 1)]


def _readers(followers: list[Follower]) -> Verdict:
    """Nobody was turned away for good."""
    verdict = Verdict()
    for follower in followers:
        verdict.expect(not follower.failure, follower.failure)
    return verdict


def _errors(found: House) -> Verdict:
    """Services say that something is away as a warning; an error would be a defect of theirs."""
    verdict = Verdict(checked=len(found.histories) + len(found.relays))
    verdict.wrong += [line for line in found.errors() if not any(words in line for words in _EXPECTED_ERRORS)]
    return verdict
