"""A request on its way: its answers come back in its order, and a group is halved without losing order or atomicity."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.history.v1 import history_service_pb2
from services.chassis.errors import Unavailable
from services.history import wire
from services.history.ledger import APPENDED, INVALID, Decision
from services.history.validate import CheckedSet, check_set
from services.history.work import Order, Part, Submission, Work, halves
from tests.support import events


def checked(good: int, bad: int = 0, *, atomic: bool = False) -> CheckedSet:
    """A set with `bad` malformed events before its good ones."""
    made = [events.user_message() for _ in range(good + bad)]
    for event in made[:bad]:
        event.ClearField("event_id")
    request = history_service_pb2.AppendEventsRequest(sets=[events.append_set(events.key(), *made, atomic=atomic)])
    return check_set(wire.parse_append(request.SerializeToString()).sets[0], "sets[0]")


async def submitted(*sets: CheckedSet) -> tuple[Submission, list[Work]]:
    submission = Submission(sets)
    return submission, submission.works(Order(), "")


async def test_answers_are_put_back_where_they_belong() -> None:
    submission, (first, second) = await submitted(checked(2, 1), checked(0, 1), checked(1))
    second.answer([Decision(APPENDED, 7)])
    first.answer([Decision(APPENDED, 1)])
    assert not submission.done.done()
    first.answer([Decision(APPENDED, 2)])
    answers = await submission.done
    assert [[found.outcome for found in each] for each in answers] == [
        [INVALID, APPENDED, APPENDED],
        [INVALID],
        [APPENDED],
    ]
    assert answers[0][2].sequence == 2


async def test_a_request_without_anything_to_commit_is_answered_at_once() -> None:
    submission, works = await submitted(checked(0, 2), checked(0))
    assert works == []
    assert [len(each) for each in await submission.done] == [2, 0]


async def test_one_failed_set_fails_the_request_and_its_stream() -> None:
    submission, (first, second) = await submitted(checked(1), checked(1))
    first.answer([Decision(APPENDED, 1)])
    second.fail(Unavailable("away", reason="DEPENDENCY_UNAVAILABLE"))
    with pytest.raises(Unavailable):
        await submission.done
    assert second.order.failure is not None


async def test_a_failure_after_the_answer_changes_nothing() -> None:
    submission, (work,) = await submitted(checked(1))
    work.answer([Decision(APPENDED, 1)])
    work.fail(Unavailable("away", reason="DEPENDENCY_UNAVAILABLE"))
    assert (await submission.done)[0][0].sequence == 1
    assert work.order.failure is None


async def test_a_caller_that_is_gone_is_answered_all_the_same() -> None:
    submission, (work,) = await submitted(checked(1))
    submission.done.cancel()
    work.answer([Decision(APPENDED, 1)])
    work.fail(Unavailable("away", reason="DEPENDENCY_UNAVAILABLE"))
    assert submission.done.cancelled()


@given(st.lists(st.tuples(st.integers(1, 6), st.booleans()), min_size=1, max_size=6))
def test_halving_ends_at_single_parts_in_their_order(shape: list[tuple[int, bool]]) -> None:
    async def works() -> list[Work]:
        _, made = await submitted(*(checked(size, atomic=atomic) for size, atomic in shape))
        return made

    made = asyncio.run(works())
    whole = [Part(work, 0, len(work.records)) for work in made]
    ends: list[Part] = []

    def split(parts: list[Part]) -> None:
        if len(parts) == 1 and parts[0].single:
            ends.append(parts[0])
            return
        first, second = halves(parts)
        assert first
        assert second
        split(first)
        split(second)

    split(whole)
    assert [record for part in ends for record in part.records] == [record for work in made for record in work.records]
    assert all(len(part.records) == len(part.work.records) for part in ends if part.work.atomic)
