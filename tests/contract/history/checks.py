"""What the guarantees say of a log, as checks of what a reader was given."""

from __future__ import annotations

from collections.abc import Sequence

from hearth.types.v1 import event_pb2

ENDINGS = frozenset(
    {"execution.completed", "execution.paused", "execution.stopped", "execution.failed", "execution.lost"}
)


def ordered(items: Sequence[event_pb2.EventItem]) -> None:
    """H1: ascending and contiguous, from the first event on."""
    assert [item.cursor.sequence for item in items] == list(range(1, len(items) + 1))


def once(log: Sequence[str], applied: Sequence[str]) -> None:
    """H3: a reader applied the whole log, each event once, in its order."""
    assert list(applied) == list(log)
    assert len(set(applied)) == len(applied)


def one_ending(items: Sequence[event_pb2.EventItem]) -> None:
    """H6: no execution has two endings, and no output of an execution follows its ending."""
    ended: set[str] = set()
    for item in items:
        event = item.event
        if event.scope != event_pb2.EVENT_SCOPE_RUNNER:
            continue
        assert event.execution_id not in ended, f"{event.type} after an ending"
        if event.type in ENDINGS:
            ended.add(event.execution_id)


def fenced(items: Sequence[event_pb2.EventItem]) -> None:
    """H7: the epoch of runner output never falls, and belongs to one execution."""
    epoch, holder = 0, ""
    for item in items:
        event = item.event
        if event.scope != event_pb2.EVENT_SCOPE_RUNNER:
            continue
        assert event.epoch >= epoch, "output of a superseded epoch"
        assert event.epoch > epoch or event.execution_id == holder, "an epoch with two executions"
        epoch, holder = event.epoch, event.execution_id
