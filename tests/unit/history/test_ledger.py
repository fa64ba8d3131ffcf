"""The decision table of the log: each row of it, and that no sequence of events breaks its invariants."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.history.ledger import (
    ALREADY_ENDED,
    APPENDED,
    CONFLICT,
    DUPLICATE,
    INVALID,
    QUARANTINED,
    RETRY,
    SET_ABORTED,
    Decision,
    Draft,
    Ending,
    Execution,
    Kind,
    LogState,
    Manifest,
    Record,
    Stored,
    unread,
)

X, Y = "00000000-0000-4000-8000-0000000000aa", "00000000-0000-4000-8000-0000000000bb"
EMPTY = LogState()


def event_id(number: int) -> str:
    return f"00000000-0000-4000-8000-{number:012d}"


def record(
    number: int,
    kind: Kind = Kind.OUTPUT,
    *,
    execution_id: str = X,
    epoch: int = 1,
    counted: int = 0,
    incomplete: str = "",
    content: str = "",
) -> Record:
    """Event `number`; `counted` and `incomplete` are of its manifest."""
    runner = kind not in (Kind.SESSION, Kind.GAP)
    manifest = Manifest(counted, bool(incomplete), incomplete) if kind is Kind.ENDING else None
    return Record(
        event_id=event_id(number),
        digest=f"{number}{content}".encode(),
        kind=kind,
        type=kind.name.lower(),
        execution_id=execution_id if runner else "",
        epoch=epoch if runner else 0,
        raw=b"",
        manifest=manifest,
        gap_reason="lost" if kind is Kind.GAP else "",
    )


def started(number: int, execution_id: str = X, epoch: int = 1) -> Record:
    return record(number, Kind.STARTED, execution_id=execution_id, epoch=epoch)


def decide(state: LogState, *records: Record, stored: dict[str, Stored] | None = None) -> tuple[list[Decision], Draft]:
    draft = Draft(state, stored)
    return [draft.decide(found) for found in records], draft


def after(*records: Record) -> LogState:
    """The state that these records leave; all of them are appended."""
    decisions, draft = decide(EMPTY, *records)
    assert {found.outcome for found in decisions} <= {APPENDED}
    return draft.state


OPEN = after(started(1), record(2))


def test_sequences_follow_the_head_and_the_tail_is_the_last_event() -> None:
    decisions, draft = decide(OPEN, record(3), record(4, Kind.SESSION))
    assert decisions == [Decision(APPENDED, 3), Decision(APPENDED, 4)]
    assert (draft.state.head, draft.state.tail_id, draft.state.runner_events) == (4, event_id(4), 2)


def test_started_opens_the_execution_at_its_epoch() -> None:
    decisions, draft = decide(EMPTY, started(1, epoch=7))
    assert decisions == [Decision(APPENDED, 1)]
    assert draft.writes.opened == {X: Execution(7)}
    assert (draft.state.epoch, draft.state.execution_id, draft.state.ended) == (7, X, False)


def test_n54_output_of_an_execution_that_was_never_started_is_invalid() -> None:
    decisions, draft = decide(EMPTY, record(1))
    assert decisions == [Decision(INVALID, reason="UNKNOWN_EXECUTION")]
    assert not draft.writes
    assert decide(OPEN, record(3, execution_id=Y, epoch=2))[0] == [Decision(INVALID, reason="UNKNOWN_EXECUTION")]


def test_a_higher_epoch_raises_an_open_execution_and_counts_anew() -> None:
    decisions, draft = decide(OPEN, record(3, epoch=5))
    assert decisions == [Decision(APPENDED, 3)]
    assert draft.writes.changed == {X: Execution(5)}
    assert draft.state.runner_events == 1
    assert decide(draft.state, record(4))[0] == [Decision(QUARANTINED, reason="STALE_EPOCH", current_epoch=5)]


def test_an_equal_epoch_of_another_execution_is_taken() -> None:
    for late in (started(3, Y), record(3, execution_id=Y)):
        decisions, draft = decide(OPEN, late)
        assert decisions == [Decision(QUARANTINED, reason="EPOCH_TAKEN", current_epoch=1)]
        assert [found.record for found in draft.writes.quarantined] == [late]


def test_a_stale_epoch_is_quarantined_before_it_is_asked_whether_the_execution_is_known() -> None:
    state = after(started(1, epoch=3))
    decisions, _ = decide(state, started(2, Y, epoch=2), record(3, execution_id=Y, epoch=2))
    assert [found.reason for found in decisions] == ["STALE_EPOCH", "STALE_EPOCH"]


def test_a_new_execution_leaves_the_old_one_open_and_silent_until_a_takeover_ends_it() -> None:
    state = after(started(1), started(2, Y, epoch=2))
    decisions, draft = decide(
        state,
        record(3),
        record(4, Kind.ENDING),
        record(5, Kind.ENDING, epoch=3, incomplete="runner gone"),
        record(6, execution_id=Y, epoch=2),
        record(7, execution_id=Y, epoch=4),
    )
    assert [(found.outcome, found.reason) for found in decisions] == [
        (QUARANTINED, "STALE_EPOCH"),
        (QUARANTINED, "STALE_EPOCH"),
        (APPENDED, ""),
        (QUARANTINED, "STALE_EPOCH"),
        (APPENDED, ""),
    ]
    assert draft.state.executions[X].ending == Ending(event_id(5), "ending", 3, 3)
    assert draft.state.executions[Y] == Execution(4)


def test_n38_the_first_ending_wins_and_nothing_follows_it() -> None:
    first, second = record(3, Kind.ENDING, counted=1), record(4, Kind.ENDING, epoch=9, incomplete="lost")
    decisions, draft = decide(OPEN, first, second, record(5), started(6, epoch=10))
    winner = Ending(event_id(3), "ending", 1, 3)
    assert decisions == [
        Decision(APPENDED, 3),
        Decision(ALREADY_ENDED, reason="EXECUTION_ENDED", winner=winner, current_epoch=1),
        Decision(QUARANTINED, reason="EXECUTION_ENDED", winner=winner, current_epoch=1),
        Decision(QUARANTINED, reason="EXECUTION_ENDED", winner=winner, current_epoch=1),
    ]
    assert [found.record.event_id for found in draft.writes.quarantined] == [event_id(4), event_id(5), event_id(6)]
    assert (draft.state.ended, draft.state.epoch) == (True, 1)


def test_an_ended_execution_says_so_whatever_the_epoch() -> None:
    state = after(started(1), record(2, Kind.ENDING), started(3, Y, epoch=2))
    decisions, _ = decide(state, record(4))
    assert decisions[0].reason == "EXECUTION_ENDED"
    assert decisions[0].winner is not None


@pytest.mark.parametrize(("counted", "missing"), [(2, 1), (5, 4)])
def test_an_ending_waits_for_what_its_manifest_counts(counted: int, missing: int) -> None:
    decisions, draft = decide(OPEN, record(3, Kind.ENDING, counted=counted))
    assert decisions == [Decision(RETRY, missing=missing)]
    assert not draft.writes
    assert draft.state == OPEN._replace(executions=draft.state.executions)


def test_a_retried_takeover_does_not_raise_the_epoch() -> None:
    decisions, draft = decide(OPEN, record(3, Kind.ENDING, epoch=2, counted=1), record(4))
    assert [found.outcome for found in decisions] == [RETRY, APPENDED]
    assert draft.state.epoch == 1


def test_an_incomplete_manifest_ends_at_once_and_is_remembered() -> None:
    _, draft = decide(OPEN, record(3, Kind.ENDING, counted=9, incomplete="spill\0 lost"))
    assert draft.state.executions[X].incomplete_reason == "spill lost"
    assert draft.writes.changed[X].incomplete


def test_only_a_verified_manifest_clears_an_incompleteness() -> None:
    marked = OPEN._replace(executions={X: Execution(1, None, True, "known loss")})
    _, verified = decide(marked, record(3, Kind.ENDING, counted=1))
    assert not verified.state.executions[X].incomplete
    _, undercounted = decide(marked, record(3, Kind.ENDING, counted=0))
    assert undercounted.state.executions[X].incomplete
    _, incomplete = decide(marked, record(3, Kind.ENDING, counted=1, incomplete="more loss"))
    assert incomplete.state.executions[X].incomplete_reason == "known loss"


def test_the_manifest_counts_output_of_its_epoch_without_start_and_session_events() -> None:
    state = after(started(1), record(2), record(3, Kind.SESSION), record(4, epoch=2), record(5, epoch=2))
    assert decide(state, record(6, Kind.ENDING, epoch=2, counted=3))[0][0] == Decision(RETRY, missing=1)
    assert decide(state, record(6, Kind.ENDING, epoch=2, counted=2))[0][0].outcome == APPENDED


def test_n52_a_duplicate_repeats_the_first_sequence_even_when_it_is_fenced_by_now() -> None:
    stored = {event_id(2): Stored(b"2", 2)}
    state = after(started(1), record(2), record(3, Kind.ENDING, counted=1))
    assert decide(state, record(2), stored=stored)[0] == [Decision(DUPLICATE, 2)]


def test_the_same_id_with_other_content_is_a_conflict() -> None:
    stored = {event_id(2): Stored(b"2", 2)}
    decisions, draft = decide(OPEN, record(2, content="other"), stored=stored)
    assert decisions == [Decision(CONFLICT, reason="EVENT_CONFLICT")]
    assert not draft.writes


def test_a_duplicate_inside_of_a_group_is_found_without_the_database() -> None:
    decisions, draft = decide(OPEN, record(3), record(3), record(3, content="other"))
    assert [found.outcome for found in decisions] == [APPENDED, DUPLICATE, CONFLICT]
    assert decisions[1].sequence == 3
    assert len(draft.writes.appended) == 1


def test_n53_a_repeated_quarantined_event_says_again_why_and_who_won() -> None:
    state = after(started(1), record(2, Kind.ENDING))
    stored = {event_id(3): Stored(b"3", 0, "EXECUTION_ENDED")}
    decisions, draft = decide(state, record(3, Kind.ENDING), stored=stored)
    assert decisions[0] == Decision(
        DUPLICATE, reason="EXECUTION_ENDED", winner=Ending(event_id(2), "ending", 1, 2), current_epoch=1
    )
    assert not draft.writes


def test_session_events_pass_every_fence() -> None:
    state = after(started(1, epoch=5), record(2, Kind.ENDING, epoch=5))
    assert decide(state, record(3, Kind.SESSION))[0] == [Decision(APPENDED, 3)]


def test_a_gap_marks_the_log_once() -> None:
    _, draft = decide(OPEN, record(3, Kind.GAP))
    assert draft.state.gap_reason == "lost"
    first = OPEN._replace(gap_reason="earlier")
    assert decide(first, record(3, Kind.GAP))[1].state.gap_reason == "earlier"


def test_a_deleted_log_takes_nothing() -> None:
    deleted = OPEN._replace(deleted=True)
    decisions, draft = decide(deleted, record(3), record(4, Kind.SESSION), started(5, Y, 9))
    assert {(found.outcome, found.reason) for found in decisions} == {(INVALID, "LOG_DELETED")}
    assert not draft.writes


def test_an_atomic_set_is_appended_whole() -> None:
    draft = Draft(OPEN)
    decisions = draft.decide_set([record(3), record(4, Kind.ENDING, counted=2)])
    assert decisions == [Decision(APPENDED, 3), Decision(APPENDED, 4)]


@pytest.mark.parametrize(
    ("bad", "outcome"),
    [
        (record(4, Kind.ENDING, counted=9), RETRY),
        (record(4, execution_id=Y, epoch=8), INVALID),
        (record(2, content="other"), CONFLICT),
    ],
)
def test_an_atomic_set_with_one_refused_event_changes_nothing(bad: Record, outcome: int) -> None:
    draft = Draft(OPEN, {event_id(2): Stored(b"2", 2)})
    decisions = draft.decide_set([record(3), record(3), bad, record(5, Kind.GAP)])
    assert [found.outcome for found in decisions] == [SET_ABORTED, SET_ABORTED, outcome, SET_ABORTED]
    assert not draft.writes
    assert draft.state == OPEN._replace(executions=draft.state.executions)
    assert draft.decide(record(3)) == Decision(APPENDED, 3)


def test_a_retry_inside_of_an_atomic_set_counts_what_comes_with_it() -> None:
    draft = Draft(OPEN)
    decisions = draft.decide_set([record(3), record(4, Kind.ENDING, counted=3)])
    assert decisions[1] == Decision(RETRY, missing=1)


def test_fenced_events_of_an_atomic_set_are_kept_aside_and_the_rest_is_not_stored() -> None:
    draft = Draft(after(started(1, epoch=5)))
    decisions = draft.decide_set([record(2, Kind.SESSION), record(3, epoch=4)])
    assert [found.outcome for found in decisions] == [SET_ABORTED, QUARANTINED]
    assert [found.record.event_id for found in draft.writes.quarantined] == [event_id(3)]
    again = draft.decide_set([record(2, Kind.SESSION), record(3, epoch=4)])
    assert [found.outcome for found in again] == [SET_ABORTED, DUPLICATE]


def test_an_event_that_only_its_own_set_would_have_fenced_is_not_kept_aside() -> None:
    draft = Draft(after(started(1), started(2, Y, epoch=2)))
    decisions = draft.decide_set([record(3, epoch=3), record(4, execution_id=Y, epoch=2)])
    assert [found.outcome for found in decisions] == [SET_ABORTED, SET_ABORTED]
    assert not draft.writes


def test_a_set_may_repeat_stored_events() -> None:
    draft = Draft(OPEN, {event_id(2): Stored(b"2", 2)})
    assert draft.decide_set([record(2), record(3)]) == [Decision(DUPLICATE, 2), Decision(APPENDED, 3)]


def test_what_must_be_read_before_a_decision() -> None:
    assert unread(OPEN, [record(3), record(4, Kind.SESSION)]) == set()
    assert unread(OPEN, [record(3, execution_id=Y, epoch=2)]) == {Y}
    assert unread(OPEN, [started(3, Y, epoch=2), record(4, execution_id=Y, epoch=2)]) == set()
    assert unread(OPEN, [started(3, Y, epoch=1)]) == {Y}


# --- every history that the table lets through ---

_EVENTS = st.builds(
    record,
    st.integers(1, 40),
    st.sampled_from(list(Kind)),
    execution_id=st.sampled_from([X, Y, "00000000-0000-4000-8000-0000000000cc"]),
    epoch=st.integers(1, 4),
    counted=st.integers(0, 3),
    incomplete=st.sampled_from(["", "", "lost"]),
    content=st.sampled_from(["", "", "", "other"]),
)


class Log:
    """A log as the store would keep it: what was appended and kept aside, by the decisions alone."""

    def __init__(self) -> None:
        self.state = EMPTY
        self.events: list[Record] = []
        self.stored: dict[str, Stored] = {}
        self.aside: list[str] = []

    def commit(self, draft: Draft) -> None:
        for sequence, found in draft.writes.appended:
            self.events.append(found)
            assert sequence == len(self.events)
            assert found.event_id not in self.stored
            self.stored[found.event_id] = Stored(found.digest, sequence)
        for found, reason, _ in draft.writes.quarantined:
            assert found.event_id not in self.stored
            self.stored[found.event_id] = Stored(found.digest, 0, reason)
            self.aside.append(found.event_id)
        self.state = draft.state._replace(id=1, revision="r")


def check(events: Sequence[Record]) -> None:
    """The invariants of a canonical log, found without the ledger."""
    epoch, holder = 0, ""
    known: set[str] = set()
    ended: set[str] = set()
    for found in events:
        if not found.execution_id:
            continue
        assert found.execution_id not in ended, "output after an ending"
        assert found.epoch > epoch or (found.epoch == epoch and found.execution_id == holder), "output behind a fence"
        assert found.execution_id in known or found.kind is Kind.STARTED, "output of an unknown execution"
        epoch, holder = found.epoch, found.execution_id
        known.add(found.execution_id)
        if found.kind is Kind.ENDING:
            ended.add(found.execution_id)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.lists(_EVENTS, min_size=1, max_size=5)), max_size=12))
def test_no_sequence_of_sets_breaks_the_log(sets: list[tuple[bool, list[Record]]]) -> None:
    log = Log()
    for atomic, records in sets:
        draft = Draft(log.state, log.stored)
        decisions = draft.decide_set(records) if atomic else [draft.decide(found) for found in records]
        appended = [found for found in decisions if found.outcome == APPENDED]
        assert len(appended) == len(draft.writes.appended)
        if atomic and appended:
            assert all(found.sequence for found in decisions)
        log.commit(draft)
    check(log.events)
    assert log.state.head == len(log.events)
    for execution_id, execution in log.state.executions.items():
        endings = [it for it in log.events if it.kind is Kind.ENDING and it.execution_id == execution_id]
        assert len(endings) == (execution.ending is not None)


@settings(max_examples=150, deadline=None)
@given(st.lists(_EVENTS, min_size=1, max_size=20), st.data())
def test_how_events_are_grouped_changes_no_decision(records: list[Record], data: st.DataObject) -> None:
    alone, grouped = Log(), Log()
    one_by_one = []
    for found in records:
        draft = Draft(alone.state, alone.stored)
        one_by_one.append(draft.decide(found))
        alone.commit(draft)
    together = []
    rest = list(records)
    while rest:
        size = data.draw(st.integers(1, len(rest)))
        draft = Draft(grouped.state, grouped.stored)
        together += [draft.decide(found) for found in rest[:size]]
        grouped.commit(draft)
        rest = rest[size:]
    assert one_by_one == together
    assert alone.events == grouped.events
    assert alone.aside == grouped.aside


@given(st.lists(_EVENTS, min_size=1, max_size=20))
def test_sending_everything_again_changes_nothing(records: list[Record]) -> None:
    log = Log()
    first = Draft(log.state, log.stored)
    decisions = [first.decide(found) for found in records]
    log.commit(first)
    again = Draft(log.state, log.stored)
    for found, before in zip(records, decisions, strict=True):
        now = again.decide(found)
        if before.outcome in (APPENDED, DUPLICATE):
            assert now.outcome == DUPLICATE
            assert now.sequence == before.sequence
        if before.outcome in (QUARANTINED, ALREADY_ENDED):
            assert (now.outcome, now.sequence, now.reason) == (DUPLICATE, 0, before.reason)
            assert now.winner == before.winner or before.winner is None
