"""H8: one bad record never fails or delays its neighbours, and every bad input has an answer that changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import asyncpg
import grpc
import grpc.aio
import pytest
import pytest_asyncio

from hearth.history.v1 import history_service_pb2
from hearth.types.v1 import event_pb2, session_pb2
from services.chassis.errors import InvalidArgument
from tests.support import events
from tests.support.history_client import APPENDED, INVALID, Client, ids, refused

Database: TypeAlias = "asyncpg.Connection[asyncpg.Record]"

# The database finds a certain text in a body indigestible, as it would an encoding or a size that no check foresaw.
_POISON = b"indigestible"
_TRIGGER = """
CREATE FUNCTION history.refuse() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF position('indigestible'::bytea IN NEW.body) > 0 THEN
        RAISE EXCEPTION 'indigestible' USING ERRCODE = 'data_exception';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER refuse BEFORE INSERT ON history.events FOR EACH ROW EXECUTE FUNCTION history.refuse();
"""


@pytest_asyncio.fixture
async def picky(database: Database) -> AsyncIterator[None]:
    """Makes the database refuse poisoned events."""
    await database.execute(_TRIGGER)
    yield
    await database.execute("DROP TRIGGER refuse ON history.events; DROP FUNCTION history.refuse()")


def poisoned() -> event_pb2.Event:
    return events.user_message(_POISON.decode())


@pytest.mark.usefixtures("picky")
async def test_what_the_database_refuses_fails_alone(history: Client) -> None:
    session = events.key()
    good = [events.user_message(f"{number}") for number in range(9)]
    results = await history.append(session, *good[:3], poisoned(), *good[3:7], poisoned(), *good[7:])
    assert [result.outcome for result in results] == [APPENDED] * 3 + [INVALID] + [APPENDED] * 4 + [INVALID] + [
        APPENDED
    ] * 2
    assert results[3].problems[0].description == "the database refuses to store it"
    assert ids(await history.read(session)) == [event.event_id for event in good]


@pytest.mark.usefixtures("picky")
async def test_neighbours_of_a_bad_record_never_notice(history: Client) -> None:
    sessions = [events.key() for _ in range(20)]
    bad = sessions[7]

    async def append(session: session_pb2.SessionKey) -> list[int]:
        outcomes: list[int] = []
        for _ in range(5):
            event = poisoned() if session is bad else events.user_message()
            outcomes += [result.outcome for result in await history.append(session, event)]
        return outcomes

    found = await asyncio.gather(*(append(session) for session in sessions))
    for session, outcomes in zip(sessions, found, strict=True):
        assert outcomes == [INVALID if session is bad else APPENDED] * 5
    assert await history.accepted(bad, events.user_message()) == [1]


@pytest.mark.usefixtures("picky")
async def test_an_atomic_set_is_refused_whole(history: Client) -> None:
    session, neighbour = events.key(), events.key()
    first, second = await history.append_sets(
        events.append_set(session, events.user_message(), poisoned(), atomic=True),
        events.append_set(neighbour, events.user_message()),
    )
    assert [result.outcome for result in first.results] == [INVALID, INVALID]
    assert [result.outcome for result in second.results] == [APPENDED]
    assert not await history.read(session)


@pytest.mark.usefixtures("picky")
async def test_the_ending_behind_a_refused_record_knows_that_it_is_missing(history: Client) -> None:
    session, run = events.key(), events.Run()
    await history.accepted(session, run.started())
    bad = run.message(_POISON.decode())
    results = await history.append(session, run.message(), bad, run.completed())
    assert [result.outcome for result in results[:2]] == [APPENDED, INVALID]
    assert results[2].missing == 1
    run.counted -= 1
    assert await history.accepted(session, run.completed(incomplete="an event was refused")) == [3]


async def test_a_reader_that_takes_nothing_holds_nobody_up(history: Client, other: Client) -> None:
    session = events.key()
    for _ in range(8):
        await history.accepted(session, *(events.custom(10_000) for _ in range(90)))
    calls = [
        client.stub.StreamEvents(history_service_pb2.StreamEventsRequest(session=session))
        for client in (history, other)
        for _ in range(5)
    ]
    for call in calls:
        await call.read()
    for _ in range(30):
        async with asyncio.timeout(5):
            await history.accepted(session, events.user_message())
            await other.accepted(events.key(), events.user_message())
    last = 0
    while isinstance(chunk := await calls[0].read(), history_service_pb2.StreamEventsResponse):
        last = chunk.events[-1].cursor.sequence
    assert last == 720
    for call in calls:
        call.cancel()


async def test_a_cancelled_caller_leaves_its_event_whole_or_absent(history: Client) -> None:
    session = events.key()
    sent = [events.user_message() for _ in range(40)]
    for place, event in enumerate(sent):
        call = history.stub.AppendEvents(
            history_service_pb2.AppendEventsRequest(sets=[events.append_set(session, event)])
        )
        await asyncio.sleep(place % 8 * 0.0003)
        call.cancel()
    neighbour = events.key()
    assert await history.accepted(neighbour, events.user_message()) == [1]
    results = await history.append(session, *sent)
    assert len({result.sequence for result in results}) == 40
    assert sorted(result.sequence for result in results) == list(range(1, 41))
    assert len(await history.read(session)) == 40


async def test_an_event_of_any_accepted_text_comes_back_as_it_was(history: Client) -> None:
    session = events.key()
    texts = ["", "\0", "a\0b", "\u2028", "\U0001f600", "x" * 300_000]
    sent = [events.user_message(text) for text in texts]
    await history.accepted(session, *sent)
    assert [item.event for item in await history.read(session)] == sent


@pytest.mark.parametrize("size", [0, 1, 127, 128, 2_000, 9_000, 2**20 - 300])
async def test_events_of_every_size_come_back_as_they_were(history: Client, size: int) -> None:
    session, event = events.key(), events.custom(size)
    await history.accepted(session, event)
    assert (await history.read(session))[0].event == event


async def test_malformed_events_are_answered_one_by_one(history: Client) -> None:
    session = events.key()
    bad = events.user_message()
    bad.event_id = "nope"
    too_large = events.custom(2**20)
    results = await history.append(session, bad, events.user_message(), too_large)
    assert [(result.outcome, result.reason) for result in results] == [
        (INVALID, "INVALID_FIELD"),
        (APPENDED, ""),
        (INVALID, "TOO_LARGE"),
    ]
    assert results[0].problems[0].field == "sets[0].events[0].event_id"
    assert results[2].problems[0].field == "sets[0].events[2]"


async def test_a_bad_session_key_concerns_its_own_set(history: Client) -> None:
    good = events.key()
    first, second = await history.append_sets(
        events.append_set(session_pb2.SessionKey(project="a b", session="s"), events.user_message()),
        events.append_set(good, events.user_message()),
    )
    assert first.results[0].problems[0].field == "sets[0].session.project"
    assert second.results[0].outcome == APPENDED


async def test_requests_that_are_no_requests(history: Client) -> None:
    error = await refused(history.append_sets())
    assert isinstance(error, InvalidArgument)
    assert error.field_violations[0][0] == "sets"
    many = [events.custom() for _ in range(1_001)]
    assert (await refused(history.append(events.key(), *many))).reason == "TOO_LARGE"
    for method in ("AppendEvents", "ReadEvents", "GetHeads", "DeleteLog"):
        call: Any = history.channel.unary_unary(f"/hearth.history.v1.HistoryService/{method}")
        assert (await refused(call(b"\x0a\xff\xff"))).code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("project", "session", "field"),
    [
        ("", "s", "session.project"),
        ("p", "", "session.session"),
        ("p", "x" * 129, "session.session"),
        ("p/q", "s", "session.project"),
    ],
)
async def test_every_call_names_a_wrong_key(history: Client, project: str, session: str, field: str) -> None:
    key = session_pb2.SessionKey(project=project, session=session)
    calls = [
        history.page(key),
        history.chunks(key),
        history.snapshot(key),
        history.quarantined(key),
        history.trim(key, 1),
        history.delete(key),
        history.mark_incomplete(key, events.new_id(), "why"),
    ]
    for call in calls:
        error = await refused(call)
        assert isinstance(error, InvalidArgument)
        assert [violation[0] for violation in error.field_violations] == [field]
    error = await refused(history.heads(events.key(), key))
    assert error.field_violations[0][0] == f"sessions[1].{field.removeprefix('session.')}"


async def test_other_bad_requests_name_their_field(history: Client) -> None:
    session = events.key()
    run = events.Run()
    await history.accepted(session, run.started())
    assert (await refused(history.heads())).field_violations[0][0] == "sessions"
    too_many = [session] * 1_001
    assert (await refused(history.heads(*too_many))).field_violations[0][0] == "sessions"
    assert (await refused(history.mark_incomplete(session, "x", "why"))).field_violations[0][0] == "execution_id"
    for reason in ("", "x" * 256, "a\0b"):
        error = await refused(history.mark_incomplete(session, run.execution_id, reason))
        assert error.field_violations[0][0] == "reason"
    unknown = await refused(history.mark_incomplete(session, events.new_id(), "why"))
    assert (unknown.code, unknown.reason) == (grpc.StatusCode.NOT_FOUND, "EXECUTION_NOT_FOUND")
    unknown = await refused(history.mark_incomplete(events.key(), run.execution_id, "why"))
    assert unknown.reason == "EXECUTION_NOT_FOUND"
    for token in ("x", "-1", "99999999999999999999", "9" * 5_000):
        request = history_service_pb2.ListQuarantinedRequest(session=session, page_token=token)
        assert (await refused(history.stub.ListQuarantined(request))).field_violations[0][0] == "page_token"
    assert (await refused(history.snapshot(session, page_token="x"))).field_violations[0][0] == "page_token"
    assert (await refused(history.trim(session, 2**63))).field_violations[0][0] == "through"
