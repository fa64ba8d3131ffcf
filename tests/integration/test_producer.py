"""The producer against a real history and a real relay: order and completeness through every kind of break.

What it promises is checked where it counts: in the log as history gives it out, and at a reader of the relay.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
import pytest_asyncio

from hearth.channel import open_channel
from hearth.errors import CallError
from hearth.history.v1 import history_pb2, history_service_pb2, history_service_pb2_grpc
from hearth.producer import ExecutionWriter, Producer, ProducerLimits, WriterRefused
from hearth.relay.v1 import relay_pb2, relay_service_pb2, relay_service_pb2_grpc
from hearth.types.v1 import content_pb2, event_pb2, frame_pb2, session_pb2
from services.chassis.clock import SystemClock
from tests.support import events
from tests.support.cutter import Cutter
from tests.support.processes import ServiceProcess
from tests.support.servers import Servers

APPENDED = history_pb2.APPEND_OUTCOME_APPENDED
ALREADY_ENDED = history_pb2.APPEND_OUTCOME_ALREADY_ENDED
INVALID = history_pb2.APPEND_OUTCOME_INVALID
QUARANTINED = history_pb2.APPEND_OUTCOME_QUARANTINED


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
    history: str, relay: str, *, limits: ProducerLimits | None = None, timeout: float = 10.0
) -> AsyncIterator[Producer]:
    """A producer over channels of its own; nothing of it is left afterwards."""
    before = asyncio.all_tasks()
    async with open_channel(history) as to_history, open_channel(relay) as to_relay:
        producer = Producer(history=to_history, relay=to_relay, clock=SystemClock(), limits=limits)
        await producer.start()
        try:
            yield producer
        finally:
            await producer.close(timeout)
    await asyncio.sleep(0)
    assert not {task for task in asyncio.all_tasks() - before if "producer" in task.get_name()}


@pytest_asyncio.fixture
async def producer(history: ServiceProcess, relay: ServiceProcess) -> AsyncIterator[Producer]:
    async with producing(history.address, relay.address) as found:
        yield found


async def start(
    producer: Producer, session: session_pb2.SessionKey | None = None, *, epoch: int = 1, execution_id: str = ""
) -> ExecutionWriter:
    """A writer whose execution is open."""
    writer = producer.writer(session or events.key(), execution_id or events.new_id(), epoch)
    result = await writer.event(event_pb2.Event(execution_started=event_pb2.ExecutionStarted(agent="test")))
    assert result.outcome == APPENDED
    return writer


def message(
    text: str, message_id: str = "", role: content_pb2.Role.ValueType = content_pb2.ROLE_AGENT
) -> event_pb2.Event:
    part = content_pb2.ContentPart(text=content_pb2.TextPart(text=text))
    body = event_pb2.MessageCompleted(
        message_id=message_id or events.new_id(), role=role, content=[part], finish_reason="end"
    )
    return event_pb2.Event(message_completed=body)


def completed() -> event_pb2.Event:
    return event_pb2.Event(execution_completed=event_pb2.ExecutionCompleted(finish_reason="end_turn"))


def delta(text: str) -> frame_pb2.TextDelta:
    return frame_pb2.TextDelta(text=text)


async def log_of(history: ServiceProcess, session: session_pb2.SessionKey) -> list[event_pb2.Event]:
    """The log, after a check that its sequences are 1, 2, 3 …"""
    found: list[event_pb2.Event] = []
    async with open_channel(history.address) as channel:
        stub = history_service_pb2_grpc.HistoryServiceStub(channel)
        async for chunk in stub.StreamEvents(history_service_pb2.StreamEventsRequest(session=session)):
            for item in chunk.events:
                assert item.cursor.sequence == len(found) + 1
                found.append(item.event)
    return found


def texts(log: list[event_pb2.Event]) -> list[str]:
    return [
        event.message_completed.content[0].text.text for event in log if event.WhichOneof("body") == "message_completed"
    ]


def session_of(writer: ExecutionWriter) -> session_pb2.SessionKey:
    project, session = writer.key
    return session_pb2.SessionKey(project=project, session=session)


@asynccontextmanager
async def subscribed(
    relay: ServiceProcess, session: session_pb2.SessionKey
) -> AsyncIterator[Callable[[Callable[[list[relay_pb2.Item]], bool]], asyncio.Future[list[relay_pb2.Item]]]]:
    """A reader of a session; call it with a condition to wait for on all items so far."""
    items: list[relay_pb2.Item] = []
    changed = asyncio.Event()
    async with open_channel(relay.address) as channel:
        stub = relay_service_pb2_grpc.RelayServiceStub(channel)
        request = relay_service_pb2.SubscribeRequest(session=session, after=session_pb2.Cursor())

        async def read() -> None:
            async for response in stub.Subscribe(request):
                items.extend(response.items)
                changed.set()

        async def until(condition: Callable[[list[relay_pb2.Item]], bool]) -> list[relay_pb2.Item]:
            async with asyncio.timeout(15):
                while not condition(items):
                    changed.clear()
                    await changed.wait()
            return items

        reading = asyncio.create_task(read())
        try:
            yield lambda condition: asyncio.ensure_future(until(condition))
        finally:
            reading.cancel()
            await asyncio.wait((reading,))


def kinds(items: list[relay_pb2.Item]) -> list[str]:
    return [str(item.WhichOneof("item")) for item in items]


def has_ending(items: list[relay_pb2.Item]) -> bool:
    return any(item.event.event.type == "execution.completed" for item in items)


async def test_a_turn_as_a_reader_sees_it(producer: Producer, relay: ServiceProcess, history: ServiceProcess) -> None:
    session = events.key()
    async with subscribed(relay, session) as until:
        await until(lambda items: "ready" in kinds(items))
        writer = await start(producer, session)
        for word in ("Hel", "lo ", "wor", "ld"):
            writer.frame("m1", text_delta=delta(word))
        result = writer.event(message("Hello world", "m1"))
        writer.frame("m2", text_delta=delta("more"))
        ending = await writer.ending(completed(), before=[message("more", "m2")])
        assert ((await result).outcome, ending.outcome) == (APPENDED, APPENDED)
        items = await until(has_ending)
    shown = {"m1": "", "m2": ""}
    for item in items:
        assert item.WhichOneof("item") != "gap"
        if item.WhichOneof("item") == "frame":
            shown[item.frame.frame.entity_id] += item.frame.frame.text_delta.text
        elif item.event.event.HasField("message_completed"):
            body = item.event.event.message_completed
            assert shown.pop(body.message_id) == body.content[0].text.text, "the frames come before their message"
    assert not shown
    assert [event.type for event in await log_of(history, session)] == [
        "execution.started",
        "message.completed",
        "message.completed",
        "execution.completed",
    ]


async def test_sessions_side_by_side_each_in_its_order(producer: Producer, history: ServiceProcess) -> None:
    writers = [await start(producer) for _ in range(20)]
    futures = []
    for number in range(50):
        for writer in writers:
            futures.append(writer.event(message(str(number))))
        if number % 10 == 0:
            await asyncio.sleep(0.001)
    endings = [writer.ending(completed()) for writer in writers]
    assert {(await future).outcome for future in futures} == {APPENDED}
    assert {(await future).outcome for future in endings} == {APPENDED}
    for writer in writers:
        log = await log_of(history, session_of(writer))
        assert texts(log) == [str(number) for number in range(50)]
        assert log[-1].execution_completed.summary.manifest == event_pb2.Manifest(runner_events=50)
    assert producer.stats.append_requests < 200, "events gather into few requests"


async def test_facts_of_a_session_keep_their_place_between_the_output_of_its_run(
    producer: Producer, history: ServiceProcess
) -> None:
    writer = await start(producer)
    session = session_of(writer)
    writer.event(message("1"))
    producer.append(session, events.input_queued().SerializeToString())
    writer.event(message("2"))
    producer.append(session, events.interaction_requested())
    await writer.ending(completed())
    assert [event.type for event in await log_of(history, session)] == [
        "execution.started",
        "message.completed",
        "input.queued",
        "message.completed",
        "interaction.requested",
        "execution.completed",
    ]


async def test_connections_that_break_lose_and_double_nothing(relay: ServiceProcess, history: ServiceProcess) -> None:
    async with Cutter(history.address) as cutter, producing(cutter.address, relay.address) as producer:
        writers = [await start(producer) for _ in range(5)]
        futures = []
        for number in range(300):
            for writer in writers:
                futures.append(writer.event(message(str(number))))
            await asyncio.sleep(0.01)
            if number % 50 == 25:
                cutter.cut()
            elif number % 50 == 0:
                cutter.cut_after = 400
        endings = [writer.ending(completed()) for writer in writers]
        results = await asyncio.gather(*futures, *endings)
        assert all(result.sequence for result in results)
        assert cutter.connections >= 5
        for writer in writers:
            log = await log_of(history, session_of(writer))
            assert texts(log) == [str(number) for number in range(300)]
            assert [event.type for event in log].count("execution.completed") == 1
            assert not log[-1].execution_completed.summary.manifest.incomplete


async def test_a_killed_history_costs_time_only(producer: Producer, history: ServiceProcess) -> None:
    writers = [await start(producer) for _ in range(5)]
    futures = []
    for number in range(200):
        for writer in writers:
            futures.append(writer.event(message(str(number))))
        await asyncio.sleep(0.002)
        if number == 50:
            history.kill9()
        if number == 100:
            await history.start()
    endings = [writer.ending(completed()) for writer in writers]
    async with asyncio.timeout(30):
        results = await asyncio.gather(*futures, *endings)
    assert all(result.sequence for result in results)
    for writer in writers:
        assert texts(await log_of(history, session_of(writer))) == [str(number) for number in range(200)]


async def test_a_history_that_hangs_is_given_up_and_asked_again(relay: ServiceProcess, history: ServiceProcess) -> None:
    limits = ProducerLimits(history_answer=1.0)
    async with Cutter(history.address) as cutter, producing(cutter.address, relay.address, limits=limits) as producer:
        writer = await start(producer)
        cutter.fall_silent()
        result = writer.event(message("through the silence"))
        await asyncio.sleep(0.3)
        assert not result.done()
        await asyncio.sleep(1.5)
        cutter.silent = False
        cutter.cut()
        async with asyncio.timeout(15):
            assert (await result).sequence == 2


# Frames


async def test_a_relay_that_is_away_delays_an_event_once_and_briefly(
    producer: Producer, relay: ServiceProcess, history: ServiceProcess
) -> None:
    writer = await start(producer)
    writer.frame("m1", text_delta=delta("seen"))
    await writer.event(message("seen", "m1"))
    relay.freeze()
    try:
        took = []
        for number in range(10):
            writer.frame("m2", text_delta=delta("lost"))
            began = time.monotonic()
            assert (await writer.event(message(f"on {number}"))).outcome == APPENDED
            took.append(time.monotonic() - began)
        assert took[0] >= 0.045
        assert sum(took[1:]) < 0.5, f"only the first one waits: {took}"
        assert producer.stats.relay_away
    finally:
        relay.thaw()
    async with subscribed(relay, session_of(writer)) as until:
        back = until(lambda items: any(item.frame.frame.text_delta.text.startswith("back") for item in items))
        while not back.done():
            writer.frame("m3", text_delta=delta("back"))
            await asyncio.sleep(0.02)
        await back
    await writer.ending(completed())


async def test_a_killed_relay_comes_back_by_itself(
    producer: Producer, relay: ServiceProcess, history: ServiceProcess
) -> None:
    writer = await start(producer)
    writer.frame("m1", text_delta=delta("before"))
    await writer.event(message("before", "m1"))
    relay.kill9()
    for number in range(20):
        writer.frame("m2", text_delta=delta("x"))
        assert (await writer.event(message(str(number)))).outcome == APPENDED
    await relay.start()
    async with asyncio.timeout(15):
        while producer.stats.relay_away:
            writer.frame("m3", text_delta=delta("after"))
            await asyncio.sleep(0.05)
    ending = await writer.ending(completed())
    assert ending.outcome == APPENDED
    assert len(texts(await log_of(history, session_of(writer)))) == 21


async def test_frames_of_an_outage_are_bounded(producer: Producer, relay: ServiceProcess) -> None:
    writer = await start(producer)
    relay.freeze()
    try:
        for _ in range(2_000):
            writer.frame("m1", text_delta=delta("x"))
            await asyncio.sleep(0)
        assert writer.frames_lost >= 2_000 - 256 - 1
    finally:
        relay.thaw()
    await writer.ending(completed())


async def test_frames_of_many_turns_arrive_while_nobody_waits_for_them(
    history: ServiceProcess, relay: ServiceProcess
) -> None:
    # On a busy machine the relay takes longer than an ending would wait by itself.
    async with producing(history.address, relay.address, limits=ProducerLimits(hold=30)) as producer:
        writers = [await start(producer) for _ in range(20)]
        for number in range(100):
            for writer in writers:
                writer.frame("m1", text_delta=delta(str(number)))
            await asyncio.sleep(0.005)
        await asyncio.gather(*(writer.ending(completed()) for writer in writers))
        assert sum(writer.frames_lost for writer in writers) == 0
        assert producer.stats.publish_requests < 400, "frames gather into few requests"


# Refusals


async def test_a_superseded_writer_stops(producer: Producer, history: ServiceProcess) -> None:
    session = events.key()
    old = await start(producer, session, epoch=1)
    new = await start(producer, session, epoch=2)
    result = await old.event(message("too late"))
    assert (result.outcome, result.reason) == (QUARANTINED, "STALE_EPOCH")
    refusal = await old.refused
    assert (refusal.reason, refusal.by, refusal.current_epoch) == ("STALE_EPOCH", "history", 2)
    with pytest.raises(WriterRefused):
        old.frame("m1", text_delta=delta("x"))
    with pytest.raises(WriterRefused):
        old.ending(completed())
    assert (await new.event(message("in time"))).outcome == APPENDED
    await new.ending(completed())
    assert texts(await log_of(history, session)) == ["in time"]


async def test_the_relay_fences_a_superseded_writer_that_only_streams(producer: Producer) -> None:
    session = events.key()
    old = await start(producer, session, epoch=1)
    old.frame("m1", text_delta=delta("x"))
    new = await start(producer, session, epoch=2)
    new.frame("m1", text_delta=delta("y"))
    async with asyncio.timeout(10):
        while not old.refused.done():
            await asyncio.sleep(0.02)
            if not old.refused.done():
                old.frame("m1", text_delta=delta("x"))
    refusal = old.refused.result()
    assert (refusal.by, refusal.reason, refusal.current_epoch) == ("relay", "STALE_EPOCH", 2)
    assert refusal.current_execution_id == new.execution.execution_id
    await new.ending(completed())


async def test_the_second_ending_learns_of_the_first(producer: Producer) -> None:
    session, execution_id = events.key(), events.new_id()
    one = await start(producer, session, execution_id=execution_id)
    other = producer.writer(session, execution_id, 1)
    won = await one.ending(completed())
    lost = await other.ending(completed())
    assert lost.outcome == ALREADY_ENDED
    refusal = await other.refused
    assert refusal.reason == "EXECUTION_ENDED"
    assert refusal.winner is not None
    assert refusal.winner.sequence == won.sequence


# Manifests


async def complete(history: ServiceProcess, session: session_pb2.SessionKey) -> bool:
    async with open_channel(history.address) as channel:
        stub = history_service_pb2_grpc.HistoryServiceStub(channel)
        snapshot = await stub.GetSnapshot(history_service_pb2.GetSnapshotRequest(session=session))
        return snapshot.complete


async def test_a_refused_event_makes_the_ending_incomplete_and_hinders_nothing(
    producer: Producer, history: ServiceProcess
) -> None:
    writer = await start(producer)
    good, bad, also_good = (
        writer.event(message("1")),
        writer.event(message("x", role=content_pb2.ROLE_USER)),
        writer.event(message("2")),
    )
    ending = await writer.ending(completed())
    assert [(await result).outcome for result in (good, bad, also_good)] == [APPENDED, INVALID, APPENDED]
    assert ending.outcome == APPENDED
    log = await log_of(history, session_of(writer))
    assert texts(log) == ["1", "2"]
    manifest = log[-1].execution_completed.summary.manifest
    assert (manifest.runner_events, manifest.incomplete) == (2, True)
    assert not await complete(history, session_of(writer))


async def test_an_ending_is_written_without_what_is_refused_beside_it(
    producer: Producer, history: ServiceProcess
) -> None:
    writer = await start(producer)
    bad = message("x", role=content_pb2.ROLE_USER)
    ending = await writer.ending(completed(), before=[message("cut"), bad])
    assert ending.outcome == APPENDED
    log = await log_of(history, session_of(writer))
    assert texts(log) == ["cut"]
    assert log[-1].execution_completed.summary.manifest.incomplete


async def test_an_ending_whose_data_is_gone_is_accepted_as_incomplete(
    producer: Producer, history: ServiceProcess
) -> None:
    writer = await start(producer)
    await writer.event(message("there"))
    # As if an acknowledged event had been lost by a database that failed over.
    writer._tally.count(1)
    ending = await writer.ending(completed())
    assert ending.outcome == APPENDED
    log = await log_of(history, session_of(writer))
    manifest = log[-1].execution_completed.summary.manifest
    assert (manifest.runner_events, manifest.incomplete) == (2, True)


async def test_bytes_that_are_no_event_fail_alone(producer: Producer, history: ServiceProcess) -> None:
    writer = await start(producer)
    garbage = producer.append(session_of(writer), b"\xff\xff\xff")
    good = writer.event(message("good"))
    assert (await garbage).outcome == INVALID
    assert (await good).outcome == APPENDED
    await writer.ending(completed())


async def test_requests_that_are_refused_as_a_whole_fail_for_their_cause_only(
    producer: Producer, history: ServiceProcess
) -> None:
    """An atomic set of more events than a request may hold: no result of its own, the call fails."""
    writers = [await start(producer) for _ in range(3)]
    before = [writer.event(message("before")) for writer in writers]
    too_many = writers[1].atomic([message(str(number)) for number in range(1_001)])
    after = [writer.event(message("after")) for writer in writers]
    assert {(await result).sequence for result in (*before, *after)} == {2, 3}
    with pytest.raises(CallError) as error:
        await too_many
    assert error.value.code is grpc.StatusCode.INVALID_ARGUMENT
    endings = [await writer.ending(completed()) for writer in writers]
    assert {result.outcome for result in endings} == {APPENDED}
    for writer in writers:
        manifest = (await log_of(history, session_of(writer)))[-1].execution_completed.summary.manifest
        assert manifest.incomplete == (writer is writers[1])


# Bounds and ends


async def test_output_that_waits_too_long_ends_the_turn_but_not_its_record(
    relay: ServiceProcess, history: ServiceProcess
) -> None:
    limits = ProducerLimits(waiting_bytes=100_000, spill_bytes=0)
    async with producing(history.address, relay.address, limits=limits) as producer:
        writer = await start(producer)
        history.freeze()
        try:
            for number in range(20):
                if writer.refused.done():
                    break
                writer.event(message(f"{number} " + "x" * 10_000))
            assert (await writer.refused).reason == "HISTORY_UNAVAILABLE"
            failed = event_pb2.ExecutionFailed(code="HISTORY_UNAVAILABLE")
            ending = writer.ending(event_pb2.Event(execution_failed=failed))
        finally:
            history.thaw()
        assert (await ending).outcome == APPENDED
        log = await log_of(history, session_of(writer))
        assert len(texts(log)) == 9
        assert log[-1].execution_failed.summary.manifest.incomplete


async def test_close_waits_for_what_is_on_its_way(history: ServiceProcess, relay: ServiceProcess) -> None:
    async with producing(history.address, relay.address) as producer:
        writer = await start(producer)
        futures = [writer.event(message(str(number))) for number in range(500)]
        ending = writer.ending(completed())
        await producer.close(10.0)
        assert all(future.done() for future in (*futures, ending))
        assert ending.result().outcome == APPENDED
        late = producer.append(session_of(writer), events.input_queued())
        assert isinstance(late.exception(), CallError)


async def test_close_gives_up_in_time(relay: ServiceProcess) -> None:
    async with producing("127.0.0.1:9", relay.address) as producer:
        writer = producer.writer(events.key(), events.new_id(), 1)
        future = writer.event(message("nowhere"))
        began = time.monotonic()
        await producer.close(0.3)
        assert time.monotonic() - began < 1.0
        error = future.exception()
        assert isinstance(error, CallError)
        assert error.code is grpc.StatusCode.UNAVAILABLE


async def test_a_cancelled_future_cancels_nothing(producer: Producer, history: ServiceProcess) -> None:
    writer = await start(producer)
    writer.event(message("kept")).cancel()
    await writer.ending(completed())
    log = await log_of(history, session_of(writer))
    assert texts(log) == ["kept"]
    assert not log[-1].execution_completed.summary.manifest.incomplete
