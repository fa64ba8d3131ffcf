"""H7: output of a superseded epoch never enters the log; whatever of it arrives is kept aside with its reason."""

from __future__ import annotations

import asyncio

import pytest

from hearth.history.v1 import history_pb2
from tests.support import events
from tests.support.history_client import (
    ALREADY_ENDED,
    APPENDED,
    INVALID,
    QUARANTINED,
    SET_ABORTED,
    Client,
    ids,
    refused,
)


@pytest.fixture(params=[False, True], ids=["one replica", "other replica"])
def late(request: pytest.FixtureRequest, history: Client, other: Client) -> Client:
    """Through which replica the fenced runner writes."""
    return other if request.param else history


def is_fenced(result: history_pb2.AppendResult, reason: str, epoch: int) -> None:
    assert result.outcome in (QUARANTINED, ALREADY_ENDED), result
    assert (result.reason, result.current_epoch, result.sequence) == (reason, epoch, 0)


async def test_n48_n53_a_runner_that_was_taken_over_reaches_nobody(history: Client, late: Client) -> None:
    session, run = events.key(), events.Run(3)
    await late.accepted(session, run.started(), run.message())
    assert await history.accepted(session, run.at(4).lost()) == [3]
    for event in (run.message(), run.tool(), run.completed()):
        (result,) = await late.append(session, event)
        is_fenced(result, "EXECUTION_ENDED", 4)
        assert result.winner.type == "execution.lost"
    aside = await history.quarantined(session)
    assert [found.reason for found in aside] == ["EXECUTION_ENDED"] * 3
    assert [found.current_epoch for found in aside] == [4] * 3
    assert all(found.quarantined_at.seconds for found in aside)
    assert len(await history.read(session)) == 3


async def test_a_lower_epoch_of_an_open_execution_is_stale(history: Client, late: Client) -> None:
    session, run = events.key(), events.Run(3)
    await late.accepted(session, run.started(), run.message())
    again = run.at(5)
    await history.accepted(session, again.message())
    (result,) = await late.append(session, run.message())
    is_fenced(result, "STALE_EPOCH", 5)
    await history.accepted(session, again.message(), again.completed())


async def test_an_older_execution_is_silent_once_a_newer_one_began(history: Client, late: Client) -> None:
    session, old, new = events.key(), events.Run(1), events.Run(2)
    await late.accepted(session, old.started(), old.message())
    await history.accepted(session, new.started())
    for event in (old.message(), old.completed(), old.started()):
        (result,) = await late.append(session, event)
        is_fenced(result, "STALE_EPOCH", 2)
    await history.accepted(session, new.message(), new.completed())
    assert await history.accepted(session, old.at(3).lost()) == [6]


async def test_an_epoch_belongs_to_one_execution(history: Client, late: Client) -> None:
    session, holder, thief = events.key(), events.Run(7), events.Run(7)
    await history.accepted(session, holder.started())
    for event in (thief.started(), thief.message(), thief.completed()):
        (result,) = await late.append(session, event)
        is_fenced(result, "EPOCH_TAKEN", 7)
    await history.accepted(session, holder.completed())
    (result,) = await late.append(session, thief.message())
    is_fenced(result, "EPOCH_TAKEN", 7)


async def test_output_of_an_unknown_execution_is_refused_and_not_kept(history: Client, late: Client) -> None:
    session, run = events.key(), events.Run()
    for event in (run.message(), run.completed()):
        (result,) = await late.append(session, event)
        assert (result.outcome, result.reason) == (INVALID, "UNKNOWN_EXECUTION")
    (head,) = await history.heads(session)
    assert (head.head.log_id, head.epoch) == ("", 0)
    await history.accepted(session, run.started())
    await late.accepted(session, run.message())


async def test_a_fenced_set_is_kept_event_by_event(history: Client, late: Client) -> None:
    session, run = events.key(), events.Run()
    await late.accepted(session, run.started())
    await history.accepted(session, run.at(2).lost())
    results = await late.append(session, run.tool(), run.stopped(), events.user_message(), atomic=True)
    assert [result.outcome for result in results] == [QUARANTINED, ALREADY_ENDED, SET_ABORTED]
    assert len(await history.quarantined(session)) == 2
    assert len(await history.read(session)) == 2


async def test_session_events_need_no_fence(history: Client, late: Client) -> None:
    session, run = events.key(), events.Run(9)
    await history.accepted(session, run.started(), run.completed())
    assert await late.accepted(session, events.input_queued(), events.interaction_requested()) == [3, 4]


async def test_quarantine_is_listed_by_execution_in_pages(history: Client) -> None:
    session, old, older = events.key(), events.Run(2), events.Run(1)
    await history.accepted(session, older.started(), old.started(), events.Run(3).started())
    sent = [(older, older.message("a")), (old, old.message("b")), (older, older.message("c")), (old, old.tool())]
    for _, event in sent:
        await history.append(session, event)
    assert [found.event for found in await history.quarantined(session)] == [event for _, event in sent]
    only = await history.quarantined(session, old.execution_id)
    assert [found.event for found in only] == [event for run, event in sent if run is old]
    assert await history.quarantined(session, events.new_id()) == []
    assert await history.quarantined(events.key()) == []
    error = await refused(history.quarantined(session, "x"))
    assert error.field_violations[0][0] == "execution_id"


async def test_a_runner_and_its_successor_racing_over_two_replicas(history: Client, other: Client) -> None:
    session, run = events.key(), events.Run(1)
    await history.accepted(session, run.started())
    successor = run.at(2)
    old, new = [run.message() for _ in range(25)], [successor.message() for _ in range(25)]

    async def write(client: Client, sent: list) -> list[int]:  # type: ignore[type-arg]
        return [(await client.append(session, event))[0].outcome for event in sent]

    of_old, of_new = await asyncio.gather(write(history, old), write(other, new))
    assert set(of_new) == {APPENDED}
    through = of_old.count(APPENDED)
    assert of_old == [APPENDED] * through + [QUARANTINED] * (25 - through)
    log = ids(await history.read(session))[1:]
    assert log == [event.event_id for event in old[:through] + new]
