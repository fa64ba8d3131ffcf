"""H6: each execution gets exactly one ending, by one writer, and no output of it follows."""

from __future__ import annotations

import asyncio

from tests.support import events
from tests.support.history_client import ALREADY_ENDED, APPENDED, QUARANTINED, RETRY, Client


async def test_of_racing_endings_one_wins_and_all_learn_which(history: Client, other: Client) -> None:
    for _ in range(10):
        session, run = events.key(), events.Run()
        await history.accepted(session, run.started())
        taken_over = run.at(2)
        endings = [run.completed(), run.failed(), taken_over.lost(), run.stopped(), taken_over.stopped("killed")]
        results = await asyncio.gather(
            *((history, other)[place % 2].append(session, ending) for place, ending in enumerate(endings))
        )
        outcomes = [result.outcome for (result,) in results]
        assert outcomes.count(APPENDED) == 1, outcomes
        winner = endings[outcomes.index(APPENDED)]
        losers = [result for (result,) in results if result.outcome != APPENDED]
        assert {result.outcome for result in losers} == {ALREADY_ENDED}
        for result in losers:
            assert (result.winner.event_id, result.winner.type) == (winner.event_id, winner.type)
            assert (result.winner.sequence, result.winner.epoch) == (2, winner.epoch)
        assert [item.event for item in await history.read(session)][1:] == [winner]
        assert len(await history.quarantined(session)) == 4
        (head,) = await other.heads(session)
        assert head.ended


async def test_output_racing_an_ending_is_before_it_or_aside(history: Client, other: Client) -> None:
    session, run = events.key(), events.Run()
    await history.accepted(session, run.started())
    output = [run.message(f"{number}") for number in range(20)]
    ending = run.completed(counted=0)

    async def write() -> list[int]:
        return [(await history.append(session, event))[0].outcome for event in output]

    written, (ended,) = await asyncio.gather(write(), other.append(session, ending))
    assert ended.outcome == APPENDED
    log = [item.event for item in await history.read(session)]
    assert log[-1] == ending
    assert log[1:-1] == output[: written.count(APPENDED)]
    assert written == [APPENDED] * written.count(APPENDED) + [QUARANTINED] * written.count(QUARANTINED)
    aside = [found.event for found in await history.quarantined(session)]
    assert aside == output[written.count(APPENDED) :]


async def test_an_ending_does_not_overtake_what_it_counts(history: Client) -> None:
    session, run = events.key(), events.Run()
    first, second = run.message(), run.message()
    ending = run.completed()
    (_, result) = await history.append(session, run.started(), ending)
    assert (result.outcome, result.missing) == (RETRY, 2)
    (_, result) = await history.append(session, first, ending)
    assert (result.outcome, result.missing) == (RETRY, 1)
    assert [found.outcome for found in await history.append(session, second, ending)] == [APPENDED, APPENDED]
    assert not (await history.snapshot(session)).execution.incomplete


async def test_a_retry_is_told_by_the_present_count_of_both_replicas(history: Client, other: Client) -> None:
    session, run = events.key(), events.Run()
    await history.accepted(session, run.started())
    await other.accepted(session, run.message())
    (result,) = await history.append(session, run.completed(counted=3))
    assert (result.outcome, result.missing) == (RETRY, 2)
    await other.accepted(session, run.message(), run.message())
    assert await history.accepted(session, run.completed()) == [5]


async def test_an_incomplete_ending_ends_at_once_and_stays_marked(history: Client) -> None:
    session, run = events.key(), events.Run()
    run.message()
    await history.accepted(session, run.started(), run.completed(incomplete="the spill file was lost"))
    snapshot = await history.snapshot(session)
    assert snapshot.execution.incomplete
    assert (snapshot.complete, snapshot.incomplete_reason) == (False, "the spill file was lost")


async def test_a_mark_sticks_until_a_manifest_is_verified(history: Client) -> None:
    session, run = events.key(), events.Run()
    await history.accepted(session, run.started(), run.message())
    marked = await history.mark_incomplete(session, run.execution_id, "output was dropped")
    assert (marked.incomplete, marked.incomplete_reason, marked.epoch) == (True, "output was dropped", 1)
    again = await history.mark_incomplete(session, run.execution_id, "something else")
    assert again.incomplete_reason == "output was dropped"
    assert not (await history.snapshot(session)).complete
    await history.accepted(session, run.completed())
    snapshot = await history.snapshot(session)
    assert snapshot.complete
    assert not snapshot.execution.incomplete


async def test_a_mark_after_the_ending_stays(history: Client) -> None:
    session, run = events.key(), events.Run()
    ending = run.completed()
    await history.accepted(session, run.started(), ending)
    marked = await history.mark_incomplete(session, run.execution_id, "found later")
    assert marked.ending.event_id == ending.event_id
    assert not (await history.snapshot(session)).complete


async def test_n51_a_turn_ends_in_one_atomic_set_with_its_last_output(history: Client) -> None:
    session, run = events.key(), events.Run()
    await history.accepted(session, run.started())
    last = (run.tool(), run.message(), run.stopped())
    assert await history.accepted(session, *last, atomic=True) == [2, 3, 4]
