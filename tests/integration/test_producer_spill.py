"""A history that is away for long, and the producer in front of it: bounded in memory, then complete, or honest."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import asyncpg
import pytest

from hearth._items import Output
from hearth.channel import open_channel
from hearth.history.v1 import history_pb2, history_service_pb2, history_service_pb2_grpc
from hearth.producer import ExecutionWriter, Producer, ProducerLimits, WriterRefused
from hearth.types.v1 import content_pb2, event_pb2, frame_pb2, session_pb2
from services.chassis.clock import SystemClock
from tests.support import events
from tests.support.history_client import Client
from tests.support.processes import ServiceProcess
from tests.support.relay_reader import reading
from tests.support.servers import Servers
from tests.support.waiting import ended, eventually

APPENDED = history_pb2.APPEND_OUTCOME_APPENDED


@pytest.fixture(scope="module")
def history(servers: Servers, module_postgres_dsn: str, module_valkey_url: str) -> Iterator[ServiceProcess]:
    """A history process."""
    env = {"HEARTH_POSTGRES_DSN": module_postgres_dsn, "HEARTH_VALKEY_URL": module_valkey_url}
    process = ServiceProcess("services.history", servers.scratch(), env)
    process.start_blocking()
    yield process
    process.stop()


@pytest.fixture(scope="module")
def relay(servers: Servers, history: ServiceProcess, module_valkey_url: str) -> Iterator[ServiceProcess]:
    """A relay process over it."""
    env = {"HEARTH_VALKEY_URL": module_valkey_url, "HEARTH_HISTORY_ADDRESS": history.address}
    process = ServiceProcess("services.relay", servers.scratch(), env)
    process.start_blocking()
    yield process
    process.stop()


@asynccontextmanager
async def producing(
    history: ServiceProcess, relay: ServiceProcess, limits: ProducerLimits, *, timeout: float = 10.0
) -> AsyncIterator[Producer]:
    """A producer over channels of its own."""
    async with open_channel(history.address) as to_history, open_channel(relay.address) as to_relay:
        producer = Producer(history=to_history, relay=to_relay, clock=SystemClock(), limits=limits)
        await producer.start()
        try:
            yield producer
        finally:
            await producer.close(timeout)
    assert os.listdir(limits.spill_dir) == []


def started() -> event_pb2.Event:
    return event_pb2.Event(execution_started=event_pb2.ExecutionStarted(agent="test"))


def message(text: str, message_id: str = "") -> event_pb2.Event:
    part = content_pb2.ContentPart(text=content_pb2.TextPart(text=text))
    body = event_pb2.MessageCompleted(
        message_id=message_id or events.new_id(), role=content_pb2.ROLE_AGENT, content=[part], finish_reason="end"
    )
    return event_pb2.Event(message_completed=body)


def completed() -> event_pb2.Event:
    return event_pb2.Event(execution_completed=event_pb2.ExecutionCompleted(finish_reason="end_turn"))


def session_of(writer: ExecutionWriter) -> session_pb2.SessionKey:
    return session_pb2.SessionKey(project=writer.key[0], session=writer.key[1])


async def log_of(history: ServiceProcess, session: session_pb2.SessionKey) -> list[event_pb2.Event]:
    """The log, checked to be contiguous."""
    async with open_channel(history.address) as channel:
        return [item.event for item in await Client(channel).read(session)]


def numbers(log: list[event_pb2.Event]) -> list[int]:
    """What the messages begin with."""
    found = [event for event in log if event.HasField("message_completed")]
    return [int(event.message_completed.content[0].text.text.split(" ")[0]) for event in found]


async def test_an_outage_under_load_is_bridged_in_bounds(
    history: ServiceProcess, relay: ServiceProcess, tmp_path: Path
) -> None:
    limits = ProducerLimits(waiting_bytes=500_000, spill_dir=str(tmp_path))
    async with producing(history, relay, limits) as producer:
        writers = [producer.writer(events.key(), events.new_id(), 1) for _ in range(5)]
        for writer in writers:
            await writer.event(started())
        history.kill9()
        most_in_memory = most_items = 0
        facts = []
        for number in range(3_000):
            for writer in writers:
                writer.frame(f"m{number}", text_delta=frame_pb2.TextDelta(text=f"{number} "))
                writer.event(message(f"{number} " + "x" * 1_500, f"m{number}"))
            if number % 500 == 0:
                facts.append(producer.append(session_of(writers[0]), events.input_queued()))
                items = [found for found in gc.get_objects() if isinstance(found, Output)]
                most_items = max(most_items, len(items))
            await asyncio.sleep(0)
            in_memory = [writer.waiting_bytes - writer.parked_bytes for writer in writers]
            most_in_memory = max(most_in_memory, *in_memory)
        assert producer.stats.parked_bytes > 5 * 4_000_000
        assert most_in_memory <= 500_000
        assert most_items < 5 * 500_000 / 1_500
        endings = [writer.ending(completed()) for writer in writers]
        await history.start()
        async with asyncio.timeout(60):
            assert {(await ending).outcome for ending in endings} == {APPENDED}
        assert {(await fact).outcome for fact in facts} == {APPENDED}
        assert producer.stats.parked_bytes == 0
        for writer in writers:
            log = await log_of(history, session_of(writer))
            assert numbers(log) == list(range(3_000))
            manifest = log[-1].execution_completed.summary.manifest
            assert manifest == event_pb2.Manifest(runner_events=3_000)
        log = await log_of(history, session_of(writers[0]))
        at = [sum(event.HasField("message_completed") for event in log[:place]) for place in queued(log)]
        assert at == [number + 1 for number in range(0, 3_000, 500)], "facts keep their place between the output"


def queued(log: list[event_pb2.Event]) -> list[int]:
    """The places of the facts."""
    return [place for place, event in enumerate(log) if event.type == "input.queued"]


async def test_readers_see_frames_before_what_completes_them_also_when_it_was_parked(
    history: ServiceProcess, relay: ServiceProcess, tmp_path: Path
) -> None:
    """Everything is parked at once, so each event passes through a block right behind its frame."""
    # An event waits this long for its frames, on whatever machine.
    limits = ProducerLimits(waiting_bytes=1, spill_dir=str(tmp_path), hold=20.0)
    async with producing(history, relay, limits) as producer, open_channel(relay.address) as channel:
        session = events.key()
        async with reading(channel, session) as reader:
            await reader.until_ready()
            writer = producer.writer(session, events.new_id(), 1)
            writer.event(started())
            for number in range(200):
                for piece in ("a", "b", "c"):
                    writer.frame(f"m{number}", text_delta=frame_pb2.TextDelta(text=piece))
                writer.event(message("abc", f"m{number}"))
                await asyncio.sleep(0.002)
            await writer.ending(completed())
            await reader.until_type("execution.completed")
            assert reader.text("m0") == "abc"
            assert reader.gaps == []


async def test_a_writer_that_was_superseded_meanwhile_drops_what_it_parked(
    history: ServiceProcess, relay: ServiceProcess, tmp_path: Path
) -> None:
    limits = ProducerLimits(waiting_bytes=100_000, spill_dir=str(tmp_path))
    session = events.key()
    async with (
        producing(history, relay, limits) as producer,
        producing(history, relay, limits) as other,
    ):
        old = producer.writer(session, events.new_id(), 1)
        await old.event(started())
        history.freeze()
        try:
            futures = [old.event(message(f"{number} " + "x" * 10_000)) for number in range(300)]
            assert old.parked_bytes > 1_000_000
            new = other.writer(session, events.new_id(), 2)
            first = new.event(started())
        finally:
            history.thaw()
        async with asyncio.timeout(20):
            # Which of the two is first is not ours to say; the old one must not write behind the new one.
            assert (await first).outcome == APPENDED
            if not old.refused.done():
                old.ending(completed())
            refusal = await old.refused
        assert (refusal.reason, refusal.current_epoch) == ("STALE_EPOCH", 2)
        assert old.parked_bytes == 0
        assert isinstance(futures[-1].exception(), WriterRefused)
        await new.event(message("0 new"))
        await new.ending(completed())
        log = await log_of(history, session)
        epochs = [event.epoch for event in log]
        assert epochs == sorted(epochs)
        assert log[-1].type == "execution.completed"


# A process of its own


class Spilling:
    """`tests.support.spilling_producer` as a process."""

    def __init__(self, history: ServiceProcess, directory: Path, **options: int) -> None:
        self.session, self.execution = events.key(), events.new_id()
        self._history = history
        self._directory = directory
        self._options = options

    async def __aenter__(self) -> Spilling:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.support.spilling_producer", "--history", self._history.address),
            *("--directory", str(self._directory), "--session", self.session.session, "--execution", self.execution),
            *(f"--{name.replace('_', '-')}={value}" for name, value in self._options.items()),
            stdout=asyncio.subprocess.PIPE,
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()

    async def said(self) -> dict[str, Any]:
        """The next line that it prints."""
        assert self.process.stdout is not None
        async with asyncio.timeout(60):
            found: dict[str, Any] = json.loads(await self.process.stdout.readline())
        return found


async def test_a_file_that_may_not_grow_ends_the_turn_and_loses_nothing_that_was_taken(
    history: ServiceProcess, tmp_path: Path
) -> None:
    """The system itself refuses the write, as it does on a full disk."""
    history.freeze()
    try:
        async with Spilling(history, tmp_path, count=3_000, file_limit=2_000_000) as producer:
            first = await producer.said()
            assert "File too large" in first["refused"]
            assert first["taken"] > 250
            assert os.listdir(tmp_path) == []
            history.thaw()
            assert await producer.said() == {"outcome": "APPEND_OUTCOME_APPENDED"}
            assert await producer.process.wait() == 0
    finally:
        history.thaw()
    log = await log_of(history, producer.session)
    assert numbers(log) == list(range(first["taken"]))
    manifest = log[-1].execution_failed.summary.manifest
    assert (manifest.runner_events, manifest.incomplete) == (first["taken"], True)
    assert "File too large" in manifest.incomplete_reason


async def test_a_kill_leaves_no_file(history: ServiceProcess, tmp_path: Path) -> None:
    history.freeze()
    try:
        async with Spilling(history, tmp_path, count=1_000) as producer:
            assert (await producer.said())["parked"] > 5_000_000
            assert any(name.startswith(str(tmp_path)) for name in open_in(producer.process.pid))
            producer.process.kill()
            await producer.process.wait()
    finally:
        history.thaw()
    assert os.listdir(tmp_path) == []


async def test_a_fork_leaves_no_file(history: ServiceProcess, tmp_path: Path) -> None:
    """A child that holds what its parent had open keeps nothing that has a name."""
    history.freeze()
    try:
        async with Spilling(history, tmp_path, count=1_000, fork=1) as producer:
            child = (await producer.said())["child"]
            producer.process.kill()
            await eventually(lambda: ended(producer.process.pid))
            assert any(name.startswith(str(tmp_path)) for name in open_in(child))
            assert os.listdir(tmp_path) == []
            os.kill(child, signal.SIGKILL)
            await eventually(lambda: ended(child))
    finally:
        history.thaw()
    assert os.listdir(tmp_path) == []


def open_in(pid: int) -> list[str]:
    """What a process has open, by the names it had."""
    directory = Path(f"/proc/{pid}/fd")
    return [os.readlink(directory / name) for name in os.listdir(directory)]


# Giving up


async def snapshot(history: ServiceProcess, session: session_pb2.SessionKey) -> history_service_pb2.GetSnapshotResponse:
    async with open_channel(history.address) as channel:
        stub = history_service_pb2_grpc.HistoryServiceStub(channel)
        return await stub.GetSnapshot(history_service_pb2.GetSnapshotRequest(session=session))


async def test_output_that_was_never_sent_is_said_to_be_missing(
    history: ServiceProcess, relay: ServiceProcess, module_postgres_dsn: str, tmp_path: Path
) -> None:
    """A commit hangs at another session while the producer has to end: what waits behind it will never be sent."""
    limits = ProducerLimits(waiting_bytes=10_000, spill_dir=str(tmp_path))
    connection = await asyncpg.connect(module_postgres_dsn)
    try:
        async with producing(history, relay, limits, timeout=0.2) as producer:
            stuck, behind = (producer.writer(events.key(), events.new_id(), 1) for _ in range(2))
            await stuck.event(started())
            await behind.event(started())
            async with connection.transaction():
                await connection.execute("SELECT FROM history.logs WHERE session = $1 FOR UPDATE", stuck.key[1])
                for _ in range(2):
                    stuck.event(message("0 "))
                    await asyncio.sleep(0.05)
                futures = [behind.event(message(f"{number} " + "x" * 1_000)) for number in range(100)]
                assert behind.parked_bytes
                await producer.close(0.2)
                assert all(future.exception() is not None for future in futures)
                found = await snapshot(history, session_of(behind))
                assert not found.complete
                assert found.execution.incomplete_reason == "the producer ended before it was sent"
        assert (await snapshot(history, session_of(stuck))).complete, "what was sent may be stored"
    finally:
        await connection.close()


async def test_an_ending_that_is_refused_for_good_leaves_a_mark(
    history: ServiceProcess, relay: ServiceProcess, tmp_path: Path
) -> None:
    async with producing(history, relay, ProducerLimits(spill_dir=str(tmp_path))) as producer:
        writer = producer.writer(events.key(), events.new_id(), 1)
        await writer.event(started())
        nameless = event_pb2.Event(execution_failed=event_pb2.ExecutionFailed())
        assert (await writer.ending(nameless)).outcome == history_pb2.APPEND_OUTCOME_INVALID
        session = session_of(writer)
    found = await snapshot(history, session)
    assert (found.complete, found.incomplete_reason) == (False, "history refused the ending: INVALID")
