"""H6 one ending: each execution that began gets exactly one ending, by one writer, and no output follows it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

from hearth.history.v1 import history_pb2
from hearth.types.v1 import event_pb2
from tests.checkers.verdict import Verdict
from tests.support.recording import ENDINGS, Append, Key, Log, Mark, Recording, counted, manifest_of, runner


def check(recording: Recording) -> Verdict:
    """In every log and to every reader: one ending, nothing of the run behind it, and a manifest that is true.

    Whoever was told of a winner was told the truth. In a run that settled, everything that began has ended. That an
    execution lacks output is forgotten by nothing but a later ending whose manifest is true.
    """
    verdict = Verdict()
    for reader in recording.readers:
        events = [item.event for connection in reader.connections for item in connection.events]
        _nothing_follows(events, f"{reader.session} as read", verdict)
    for key, log in recording.logs.items():
        events = [item.event for item in log.items]
        _nothing_follows(events, f"log of {key}", verdict)
        if log.oldest == 1:
            _manifests(events, key, verdict)
            _all_ended(events, log, key, verdict, settled=recording.settled)
    for append in recording.appends:
        found = recording.logs.get(append.session)
        if found is not None and append.result is not None:
            _answer(append, append.result, found, verdict)
    _marks(recording, verdict)
    return verdict


def _marks(recording: Recording, verdict: Verdict) -> None:
    answers: dict[tuple[Key, str], list[Mark]] = defaultdict(list)
    for mark in recording.marks:
        if mark.entry is None:
            continue
        what = f"{mark.session}: {mark.execution_id}, {mark.reason!r},"
        verdict.expect(
            mark.entry.incomplete and bool(mark.entry.incomplete_reason), f"{what} is not incomplete after it"
        )
        for before in answers[mark.session, mark.execution_id]:
            assert before.entry is not None
            if before.answered < mark.began and not _may_clear(recording, before):
                verdict.expect(
                    mark.entry.incomplete_reason == before.entry.incomplete_reason,
                    f"{what} says {mark.entry.incomplete_reason!r}, it was {before.entry.incomplete_reason!r}",
                )
        answers[mark.session, mark.execution_id].append(mark)


def _may_clear(recording: Recording, mark: Mark) -> bool:
    """Whether an ending with a true manifest may have come after the mark."""
    return any(
        append.session == mark.session
        and append.event.execution_id == mark.execution_id
        and append.event.type in ENDINGS
        and not manifest_of(append.event).incomplete
        and (not append.answered or append.answered >= mark.began)
        for append in recording.appends
    )


def _nothing_follows(events: Iterable[event_pb2.Event], where: str, verdict: Verdict) -> None:
    ended: dict[str, str] = {}
    for event in events:
        if not runner(event):
            continue
        by = ended.get(event.execution_id)
        verdict.expect(by is None, f"{where}: {event.type} of {event.execution_id} after its {by}")
        if event.type in ENDINGS:
            ended.setdefault(event.execution_id, event.type)


def _manifests(events: Iterable[event_pb2.Event], key: Key, verdict: Verdict) -> None:
    seen: Counter[tuple[str, int]] = Counter()
    for event in events:
        if counted(event):
            seen[event.execution_id, event.epoch] += 1
        elif runner(event) and event.type in ENDINGS:
            manifest = manifest_of(event)
            have = seen[event.execution_id, event.epoch]
            verdict.expect(
                manifest.incomplete or manifest.runner_events <= have,
                f"{key}: {event.type} counts {manifest.runner_events} events, {have} are stored",
            )


def _all_ended(events: Iterable[event_pb2.Event], log: Log, key: Key, verdict: Verdict, *, settled: bool) -> None:
    begun: dict[str, bool] = {}
    for event in events:
        if runner(event):
            begun[event.execution_id] = begun.get(event.execution_id, False) or event.type in ENDINGS
    if settled:
        for execution, ended in begun.items():
            verdict.expect(ended, f"{key}: {execution} began and has no ending")
    head = log.head
    if head is not None and head.execution_id:
        verdict.expect(
            head.ended == begun.get(head.execution_id, False),
            f"{key}: the head says ended={head.ended} of {head.execution_id}, the log says otherwise",
        )


def _answer(append: Append, result: history_pb2.AppendResult, log: Log, verdict: Verdict) -> None:
    if not result.HasField("winner") or result.winner.sequence < log.oldest:
        return
    winner = result.winner
    found = log.at(winner.sequence)
    true = (
        found is not None
        and found.event.event_id.lower() == winner.event_id.lower()
        and (found.event.type, found.event.epoch) == (winner.type, winner.epoch)
        and found.event.execution_id.lower() == append.event.execution_id.lower()
        and winner.type in ENDINGS
    )
    verdict.expect(
        true, f"{append.session}: {winner.type} at {winner.sequence} was named as the winner, and does not stand there"
    )
