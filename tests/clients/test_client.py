"""`hearth.Client` as a backend uses it: one transcript whatever becomes of the relay, and errors that have types."""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc.aio
import pytest

import hearth
from hearth import errors
from hearth.history.v1 import history_service_pb2
from hearth.relay.v1 import relay_pb2, relay_service_pb2
from hearth.session.v1 import session_pb2 as control_pb2
from hearth.session.v1 import session_service_pb2
from hearth.types.v1 import event_pb2, session_pb2
from hearth.watch import Watch
from services.chassis.errors import FailedPrecondition, ResourceExhausted
from tests.clients.serving import aborted, serving, serving_readers
from tests.contract.pool.house import House
from tests.support import events
from tests.support.cutter import Cutter

WATCHERS = 10


def new_session() -> session_pb2.SessionKey:
    return hearth.session_key("acme", f"client-{uuid.uuid4().hex[:8]}")


async def followed(client: hearth.Client, key: session_pb2.SessionKey, execution: str) -> hearth.Transcript:
    """What is visible once an execution has ended."""
    *_, last = [transcript async for transcript in client.follow(key, until_ended=execution)]
    return last


class Seen:
    """One watcher: what it shows, and the sequences of the events that it was given."""

    def __init__(self, client: hearth.Client, key: session_pb2.SessionKey) -> None:
        self.watch = client.watch(key)
        self.transcript = hearth.Transcript()
        self.sequences: list[int] = []
        self.previews = 0
        self.changed = asyncio.Event()

    async def until_ended(self, execution: str) -> None:
        async for item in self.watch:
            self.transcript.apply(item)
            if item.HasField("frame"):
                self.previews += 1
                self.changed.set()
            if item.HasField("event"):
                self.sequences.append(item.event.cursor.sequence)
                if hearth.is_ending(item.event.event.type) and item.event.event.execution_id == execution:
                    return


@pytest.mark.parametrize("how", ["killed", pytest.param("shut down", marks=pytest.mark.exhaustive)])
async def test_ten_watchers_of_a_relay_that_goes_away_end_with_the_same_transcript(
    how: str, house: House, client: hearth.Client
) -> None:
    key = new_session()
    sent = await client.send(key, "stream 400 words at 100/s")
    execution = sent.started.execution.execution_id
    seen = [Seen(client, key) for _ in range(WATCHERS)]
    async with asyncio.timeout(90), asyncio.TaskGroup() as group:
        for one in seen:
            group.create_task(one.until_ended(execution))
        # In the middle of the answer: each has some of it, and none has its end.
        await asyncio.gather(*(one.changed.wait() for one in seen))
        assert not any(entry.final for one in seen for entry in one.transcript.entries if entry.kind == "agent")
        relay = house.processes["relay"]
        if how == "killed":
            relay.kill9()
        else:
            # It says where each stream ends, and that its connections are to be left.
            assert await relay.terminate() == 0
        await relay.restart()
    stored = [item async for item in client.history(key)]
    of_the_log = hearth.Transcript()
    for item in stored:
        of_the_log.apply(relay_pb2.Item(event=item))
    assert [entry.kind for entry in of_the_log.entries] == ["user", "agent"]
    assert len(of_the_log.entries[1].text.split()) == 400
    for one in seen:
        assert one.watch.reconnects > 0
        assert one.transcript.entries == of_the_log.entries
        assert one.transcript.outcome == "completed"
        # Each event once, and none left out.
        assert one.sequences == list(range(1, len(stored) + 1))


async def test_follow_shows_a_preview_that_the_message_replaces(client: hearth.Client) -> None:
    key = new_session()
    sent = await client.send(key, "stream 20 words at 50/s")
    texts = list[tuple[str, bool]]()
    async with asyncio.timeout(60):
        async for transcript in client.follow(key, until_ended=sent.started.execution.execution_id):
            texts += [(entry.text, entry.final) for entry in transcript.entries if entry.kind == "agent"]
    previews, (whole, final) = [text for text, done in texts if not done], texts[-1]
    assert final
    assert len(whole.split()) == 20
    assert previews
    assert all(whole.startswith(text) for text in previews)


async def test_asks_queues_stops_and_kills(client: hearth.Client) -> None:
    key = new_session()
    spec = control_pb2.SessionSpec(
        permissions=control_pb2.PermissionPolicy(default_action=control_pb2.PERMISSION_ACTION_ASK)
    )
    sent = await client.send(key, 'ask search {"for": "hearths"}', spec=spec)
    async with asyncio.timeout(60):
        async for transcript in client.follow(key, until_ended=sent.started.execution.execution_id):
            if transcript.asked:
                break
        (card,) = [asked async for asked in client.interactions(key)]
        await client.answer(key, [hearth.decided(card.interaction_id, allowed=True)], answered_by="ann")
        transcript = await followed(client, key, sent.started.execution.execution_id)
    tools = [entry for entry in transcript.entries if entry.kind == "tool"]
    assert [tool.status for tool in tools] == ["succeeded"]
    running = (await client.send(key, "sleep 60")).started.execution.execution_id
    waiting = (await client.send(key, "later")).queued.input_id
    # What runs may still be on its way to the agent, and is told first then.
    assert [found.input_id async for found in client.inputs(key)][-1] == waiting
    await client.update_input(key, waiting, "not now")
    await client.remove_input(key, waiting)
    await client.stop(key, execution_id=running)
    async with asyncio.timeout(60):
        transcript = await followed(client, key, running)
    assert transcript.outcome == "stopped"
    assert transcript.waiting == {}
    await client.kill(key)
    assert [found.session.session async for found in client.sessions_of("acme")]


async def test_errors_have_types(client: hearth.Client) -> None:
    with pytest.raises(errors.NotFound) as refused:
        await client.get_session(new_session())
    assert refused.value.reason == "SESSION_NOT_FOUND"
    with pytest.raises(errors.InvalidArgument) as wrong:
        await client.send(hearth.session_key("acme", ""), "hello")
    assert wrong.value.field_violations[0][0] == "session.session"
    key = new_session()
    with pytest.raises(hearth.CallError) as ahead:
        async for _ in client.watch(key, after=session_pb2.Cursor(sequence=99)):
            pass
    assert ahead.value.reason == "CURSOR_AHEAD"
    with pytest.raises(hearth.CallError):
        async for _ in client.history(key, after=session_pb2.Cursor(sequence=99)):
            pass


async def test_operators(client: hearth.Client) -> None:
    key = new_session()
    sent = await client.send(key, "hello")
    async with asyncio.timeout(60):
        await followed(client, key, sent.started.execution.execution_id)
    assert [found.session async for found in client.admin.sandboxes("acme", key.session)] == [key]
    assert (await client.admin.stats()).turns_by_outcome["completed"] >= 1
    assert len([found async for found in client.admin.replicas()]) >= 1
    assert (await client.admin.usage()).tiers
    assert [found async for found in client.admin.quarantined(key)] == []
    await client.admin.put_credential("acme", "KEY", "planted")
    assert "KEY" in [found.name async for found in client.admin.credentials("acme")]
    await client.admin.delete_credential("acme", "KEY")
    await client.admin.delete_session(key)
    with pytest.raises(errors.FailedPrecondition) as gone:
        await client.send(key, "hello")
    assert gone.value.reason == "SESSION_DELETED"


class Guarded:
    """A relay that takes one token, and ends each stream once another one counts."""

    def __init__(self) -> None:
        self.counts = "first"
        self.served = list[tuple[str, int]]()
        self.expired = asyncio.Event()

    async def subscribe(
        self, request: relay_service_pb2.SubscribeRequest, context: grpc.aio.ServicerContext[object, object]
    ) -> object:
        token = dict(context.invocation_metadata() or ()).get("authorization")
        if token != f"Bearer {self.counts}":
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, "token")
        at = request.after.sequence + 1
        self.served.append((self.counts, at))
        event = event_pb2.EventItem(event=event_pb2.Event(type="acme.x"), cursor=session_pb2.Cursor(sequence=at))
        yield relay_service_pb2.SubscribeResponse(items=[relay_pb2.Item(event=event)])
        await self.expired.wait()
        self.expired.clear()
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "token")


async def test_a_watch_goes_on_with_a_renewed_token() -> None:
    guarded, told = Guarded(), ["first"]
    async with (
        serving_readers(guarded.subscribe) as address,
        asyncio.timeout(30),
        hearth.Client(hearth.Addresses(relay=address), token=lambda: told[0]) as client,
    ):
        items = aiter(client.watch(new_session()))
        assert (await anext(items)).event.cursor.sequence == 1
        guarded.counts = told[0] = "second"
        guarded.expired.set()
        assert (await anext(items)).event.cursor.sequence == 2
        # The same token again cannot help, and is no reason to ask for ever.
        guarded.expired.set()
        with pytest.raises(errors.Unauthenticated):
            await anext(items)
    assert guarded.served == [("first", 1), ("second", 2)]


async def test_a_watch_over_a_limit_comes_again_when_it_is_told() -> None:
    called = list[float]()

    async def subscribe(
        request: relay_service_pb2.SubscribeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> object:
        called.append(asyncio.get_running_loop().time())
        if len(called) < 3:
            await aborted(context, ResourceExhausted("too many", reason="OVERLOADED", retry_after=0.5))
        if len(called) == 4:
            await aborted(context, ResourceExhausted("too large", reason="TOO_LARGE"))
        yield relay_service_pb2.SubscribeResponse(items=[relay_pb2.Item(ready=relay_pb2.Ready())])

    async with (
        serving_readers(subscribe) as address,
        asyncio.timeout(30),
        hearth.Client(hearth.Addresses(relay=address)) as client,
    ):
        items = aiter(client.watch(new_session()))
        assert (await anext(items)).HasField("ready")
        with pytest.raises(errors.ResourceExhausted):
            await anext(items)
    assert min(called[1] - called[0], called[2] - called[1]) >= 0.5


async def test_why_a_file_was_refused_is_told_also_while_it_is_sent() -> None:
    async def put(requests: AsyncIterator[object], context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await anext(requests)
        await aborted(context, FailedPrecondition("it was deleted", reason="SESSION_DELETED"))

    handler = grpc.stream_unary_rpc_method_handler(
        put,
        request_deserializer=session_service_pb2.PutAttachmentRequest.FromString,
        response_serializer=session_service_pb2.PutAttachmentResponse.SerializeToString,
    )
    refused = list[str]()
    async with (
        serving(handler, "hearth.session.v1.SessionService", "PutAttachment") as address,
        hearth.Client(hearth.Addresses(pool=address)) as client,
    ):
        for _ in range(40):
            with pytest.raises(hearth.CallError) as caught:
                await client.attach(new_session(), bytes(8 * 1024 * 1024), name="large")
            refused.append(caught.value.reason)
    assert set(refused) == {"SESSION_DELETED"}


async def test_history_goes_on_where_its_connection_broke(addresses: hearth.Addresses, client: hearth.Client) -> None:
    key, stored = new_session(), list[str]()
    for _ in range(10):
        batch = [events.custom(20_000) for _ in range(10)]
        stored += [event.event_id for event in batch]
        await client.histories.AppendEvents(
            history_service_pb2.AppendEventsRequest(sets=[events.append_set(key, *batch)])
        )
    async with (
        Cutter(addresses.history) as cutter,
        hearth.Client(dataclasses.replace(addresses, history=cutter.address)) as behind,
    ):
        cutter.cut_after = 1_000_000
        read = [item.event.event_id async for item in behind.history(key)]
    assert read == stored
    assert cutter.connections == 2
    async with hearth.Client(dataclasses.replace(addresses, history=cutter.address)) as behind:
        with pytest.raises(errors.Unavailable):
            await anext(behind.history(key))


def test_names_are_those_that_are_told() -> None:
    assert {name: getattr(hearth, name).__name__ for name in hearth.__all__} == {name: name for name in hearth.__all__}
    assert hearth.Watch is Watch
