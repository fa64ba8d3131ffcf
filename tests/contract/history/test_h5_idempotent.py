"""H5: the same event again gives the first result; the same id with other content is a conflict and changes nothing."""

from __future__ import annotations

import asyncio

from hearth.types.v1 import event_pb2
from tests.support import events
from tests.support.history_client import (
    ALREADY_ENDED,
    APPENDED,
    CONFLICT,
    DUPLICATE,
    QUARANTINED,
    SET_ABORTED,
    Client,
)


def altered(event: event_pb2.Event) -> event_pb2.Event:
    """The same id, another content."""
    copy = event_pb2.Event()
    copy.CopyFrom(event)
    copy.entity_id = "other"
    return copy


async def test_a_retry_takes_no_new_sequence(history: Client, other: Client) -> None:
    session = events.key()
    event = events.user_message()
    assert await history.accepted(session, event) == [1]
    for client in (history, other, history):
        (again,) = await client.append(session, event)
        assert (again.outcome, again.sequence) == (DUPLICATE, 1)
    assert await other.accepted(session, events.user_message()) == [2]


async def test_what_does_not_belong_to_the_content_may_differ(history: Client) -> None:
    session, run = events.key(), events.Run()
    event = run.message()
    await history.accepted(session, run.started(), event)
    again = event_pb2.Event()
    again.CopyFrom(event)
    again.occurred_at.FromSeconds(1)
    again.frames_through = 9
    (result,) = await history.append(session, again)
    assert (result.outcome, result.sequence) == (DUPLICATE, 2)
    assert (await history.read(session))[1].event == event


async def test_other_content_under_a_stored_id_is_a_conflict(history: Client, other: Client) -> None:
    session = events.key()
    event = events.user_message()
    await history.accepted(session, event)
    for client in (history, other):
        (result,) = await client.append(session, altered(event))
        assert (result.outcome, result.reason, result.sequence) == (CONFLICT, "EVENT_CONFLICT", 0)
    assert [item.event for item in await history.read(session)] == [event]


async def test_an_id_may_be_used_again_in_another_session_and_project(history: Client) -> None:
    event = events.user_message()
    name = events.key().session
    for session in (events.key(name), events.key(name, f"other-{events.new_id()}"), events.key()):
        assert await history.accepted(session, event) == [1]


async def test_repetitions_inside_of_a_request(history: Client) -> None:
    session = events.key()
    event = events.user_message()
    results = await history.append(session, event, event, altered(event), events.user_message())
    assert [(result.outcome, result.sequence) for result in results] == [
        (APPENDED, 1),
        (DUPLICATE, 1),
        (CONFLICT, 0),
        (APPENDED, 2),
    ]


async def test_of_two_contents_that_race_under_one_id_one_is_stored(history: Client, other: Client) -> None:
    session = events.key()
    for place in range(1, 16):
        event = events.user_message(f"{place}")
        contents = [event, altered(event)]
        answers = await asyncio.gather(
            *(client.append(session, content) for content in contents for client in (history, other))
        )
        results = [result for (result,) in answers]
        stored = (await history.read(session))[-1].event
        assert stored in contents
        winner = contents.index(stored)
        of_winner, of_loser = results[winner * 2 : winner * 2 + 2], results[2 - winner * 2 : 4 - winner * 2]
        assert sorted(result.outcome for result in of_winner) == [APPENDED, DUPLICATE]
        assert [result.sequence for result in of_winner] == [place] * 2
        assert [result.outcome for result in of_loser] == [CONFLICT] * 2


async def test_an_atomic_set_is_all_or_nothing_and_can_be_sent_again(history: Client) -> None:
    session = events.key()
    stored = events.user_message()
    await history.accepted(session, stored)
    new = events.user_message()
    results = await history.append(session, new, altered(stored), atomic=True)
    assert [result.outcome for result in results] == [SET_ABORTED, CONFLICT]
    assert len(await history.read(session)) == 1
    results = await history.append(session, new, stored, events.user_message(), atomic=True)
    assert [(result.outcome, result.sequence) for result in results] == [(APPENDED, 2), (DUPLICATE, 1), (APPENDED, 3)]
    again = await history.append(session, new, stored, atomic=True)
    assert [(result.outcome, result.sequence) for result in again] == [(DUPLICATE, 2), (DUPLICATE, 1)]


async def test_a_lost_answer_about_a_fenced_event_is_given_again(history: Client, other: Client) -> None:
    session, run = events.key(), events.Run()
    ending = run.completed()
    late, second = run.message(), run.failed()
    await history.accepted(session, run.started(), ending)
    first = await history.append(session, late, second)
    assert [result.outcome for result in first] == [QUARANTINED, ALREADY_ENDED]
    for client in (history, other):
        again = await client.append(session, late, second)
        for result in again:
            assert (result.outcome, result.sequence, result.reason) == (DUPLICATE, 0, "EXECUTION_ENDED")
            assert result.winner.event_id == ending.event_id
        (conflict,) = await client.append(session, altered(late))
        assert conflict.outcome == CONFLICT


async def test_racing_copies_of_one_event_agree_on_its_sequence(history: Client, other: Client) -> None:
    session = events.key()
    event = events.user_message()
    results = await asyncio.gather(*(client.append(session, event) for client in (history, other) * 8))
    assert {result.sequence for (result,) in results} == {1}
    assert sorted(result.outcome for (result,) in results) == [APPENDED] + [DUPLICATE] * 15
