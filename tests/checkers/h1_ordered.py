"""H1 ordered: every read path returns ascending, contiguous sequences, and their order is that of the commits."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from hearth.history.v1 import history_pb2
from hearth.types.v1 import event_pb2
from tests.checkers.verdict import Verdict
from tests.support.recording import STORED, Append, Key, Recording


def check(recording: Recording) -> Verdict:
    """Reads are contiguous; what was answered before something else was sent has the lower sequence."""
    verdict = Verdict()
    for reader in recording.readers:
        for number, connection in enumerate(reader.connections):
            _contiguous(connection.events, f"{reader.session} connection {number}", verdict)
    for key, log in recording.logs.items():
        _contiguous(log.items, f"log of {key}", verdict)
        if log.head is not None:
            head = log.head.head.sequence
            verdict.expect(head == log.last or not log.items, f"{key}: the head is {head}, the log ends at {log.last}")
    for key, placed in _placed(recording.appends).items():
        _in_time(key, placed, verdict)
        _in_line(key, placed, verdict)
    return verdict


def _contiguous(items: Iterable[event_pb2.EventItem], where: str, verdict: Verdict) -> None:
    before = None
    for item in items:
        sequence = item.cursor.sequence
        if before is not None:
            verdict.expect(sequence == before + 1, f"{where}: {sequence} follows {before}")
        before = sequence


def _placed(appends: Sequence[Append]) -> dict[Key, list[tuple[int, Append]]]:
    """What an answer gave a place that it had not before, by session, in the order in which it was sent."""
    tries: dict[tuple[Key, str], int] = defaultdict(int)
    for append in appends:
        tries[append.session, append.event.event_id.lower()] += 1
    found: dict[Key, list[tuple[int, Append]]] = defaultdict(list)
    for append in appends:
        result = append.result
        if result is None or not result.sequence or result.outcome not in STORED:
            continue
        first = tries[append.session, append.event.event_id.lower()] == 1
        if first or result.outcome == history_pb2.APPEND_OUTCOME_APPENDED:
            found[append.session].append((result.sequence, append))
    return found


def _in_time(key: Key, placed: Sequence[tuple[int, Append]], verdict: Verdict) -> None:
    """No event stands behind one that was sent after it was answered."""
    earliest: Append | None = None
    earliest_sequence = 0
    for sequence, append in sorted(placed, key=lambda item: item[0], reverse=True):
        verdict.expect(
            earliest is None or earliest.answered >= append.began,
            f"{key}: {sequence} was sent after {earliest_sequence} was answered",
        )
        if earliest is None or append.answered < earliest.answered:
            earliest, earliest_sequence = append, sequence


def _in_line(key: Key, placed: Sequence[tuple[int, Append]], verdict: Verdict) -> None:
    """What was sent in order on one stream, or in one request, is stored in that order."""
    before: dict[tuple[str, int], int] = defaultdict(int)
    for sequence, append in placed:
        line = (append.line, 0) if append.line else ("", append.request)
        verdict.expect(
            sequence > before[line], f"{key}: {sequence} was sent behind {before[line]} on {append.line or 'a request'}"
        )
        before[line] = max(before[line], sequence)
