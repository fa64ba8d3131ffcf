"""The checks of the guarantees see red: each is fed a history that breaks it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from hearth.types.v1 import event_pb2
from tests.contract.history import checks
from tests.support import events

Item = event_pb2.EventItem
RUN, NEXT = events.Run(1), events.Run(2)


def log(*found: event_pb2.Event) -> list[Item]:
    items = [Item(event=event) for event in found]
    for place, item in enumerate(items, 1):
        item.cursor.sequence = place
    return items


def shifted(items: list[Item], place: int, sequence: int) -> list[Item]:
    items[place].cursor.sequence = sequence
    return items


GOOD = log(
    events.user_message(),
    RUN.started(),
    RUN.message(),
    RUN.at(2).lost(),
    events.Run(3).started(),
    events.input_queued(),
)


@pytest.mark.parametrize("check", [checks.ordered, checks.one_ending, checks.fenced])
def test_a_sound_log_passes(check: Callable[[Sequence[Item]], None]) -> None:
    check(GOOD)
    check([])


@pytest.mark.parametrize(
    ("check", "broken"),
    [
        (checks.ordered, shifted(log(RUN.started(), RUN.message()), 1, 3)),
        (checks.ordered, shifted(log(RUN.started(), RUN.message()), 1, 1)),
        (checks.ordered, shifted(log(RUN.started()), 0, 2)),
        (checks.one_ending, log(RUN.started(), RUN.completed(), RUN.message())),
        (checks.one_ending, log(RUN.started(), RUN.completed(), RUN.at(2).lost())),
        (checks.one_ending, log(RUN.started(), RUN.completed(), events.user_message(), RUN.at(3).started())),
        (checks.fenced, log(RUN.started(), NEXT.started(), RUN.message())),
        (checks.fenced, log(RUN.started(), events.Run(1).started())),
    ],
)
def test_a_broken_log_does_not(check: Callable[[Sequence[Item]], None], broken: list[Item]) -> None:
    with pytest.raises(AssertionError):
        check(broken)
