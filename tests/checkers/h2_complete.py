"""H2 complete or refused: a resume delivers everything after its cursor, or says why not and what is kept."""

from __future__ import annotations

from collections.abc import Sequence

from hearth.types.v1 import session_pb2
from services.chassis.errors import HearthError
from tests.checkers.verdict import Verdict
from tests.support.recording import Connection, Log, Reader, Recording, Trim, tag_of

_REFUSALS = frozenset({"CURSOR_AHEAD", "CURSOR_EXPIRED", "LOG_REPLACED"})
_BOUNDS = frozenset({"log_id", "oldest", "head"})


def check(recording: Recording) -> Verdict:
    """Each connection goes on right behind its cursor, up to what it promised; a refusal is true and tells the bounds.

    Where the log is known, what was delivered is what it holds, and who was given the time got all of it. Who asked
    from below what had been removed by then got nothing but that refusal.
    """
    verdict = Verdict()
    for reader in recording.readers:
        log = recording.logs.get(reader.session)
        for number, connection in enumerate(reader.connections):
            where = f"{reader.session} connection {number}"
            _goes_on(connection, where, verdict)
            _not_below(connection, [trim for trim in recording.trims if trim.session == reader.session], where, verdict)
            if connection.refusal is not None:
                _refusal(connection, connection.refusal, log, where, verdict)
            if log is not None:
                _is_the_log(connection, log, where, verdict)
        if log is not None and reader.caught_up:
            _whole(reader, log, verdict)
    return verdict


def _goes_on(connection: Connection, where: str, verdict: Verdict) -> None:
    events = connection.events
    after = connection.after
    if events and after is not None:
        first, expected = events[0].cursor.sequence, after.sequence + 1
        verdict.expect(first == expected, f"{where}: begins with {first}, expected {expected}")
    if connection.promised is not None:
        at = events[-1].cursor.sequence if events else (after.sequence if after is not None else 0)
        verdict.expect(at == connection.promised, f"{where}: said to reach {connection.promised}, ends at {at}")


def _not_below(connection: Connection, trims: Sequence[Trim], where: str, verdict: Verdict) -> None:
    oldest = max((trim.oldest for trim in trims if 0 < trim.answered < connection.began), default=0)
    after = connection.after
    if after is None or after.sequence >= oldest - 1:
        return
    verdict.expect(
        not connection.events and connection.promised is None,
        f"{where}: begins after {after.sequence}, where the log begins with {oldest}, and was answered",
    )
    refusal = connection.refusal
    verdict.expect(
        refusal is None or refusal.reason not in _REFUSALS - {"CURSOR_EXPIRED"},
        f"{where}: begins after {after.sequence}, below what is kept, and was refused for another reason",
    )


def _refusal(connection: Connection, refusal: HearthError, log: Log | None, where: str, verdict: Verdict) -> None:
    verdict.expect(bool(refusal.message), f"{where}: ended without a word")
    if refusal.reason not in _REFUSALS:
        return
    missing = _BOUNDS - set(refusal.metadata)
    verdict.expect(not missing, f"{where}: {refusal.reason} does not tell {sorted(missing)}")
    if log is None or not log.items or connection.after is None:
        return
    if refusal.reason == "CURSOR_EXPIRED" and not missing:
        at = connection.events[-1].cursor.sequence if connection.events else connection.after.sequence
        oldest = int(refusal.metadata["oldest"])
        true = not oldest or at + 1 < oldest <= max(log.oldest, log.kept_from)
        verdict.expect(true, f"{where}: expired at {at}, and {oldest} was said to be the oldest kept")
    verdict.expect(
        not _kept(connection.after, log), f"{where}: {refusal.reason}, but the log goes on from {connection.after}"
    )


def _kept(cursor: session_pb2.Cursor, log: Log) -> bool:
    """Whether the log goes on right behind the cursor."""
    if cursor.log_id not in ("", log.items[0].cursor.log_id):
        return False
    if cursor.sequence < max(log.oldest, log.kept_from) - 1 or cursor.sequence > log.last:
        return False
    found = log.at(cursor.sequence)
    return not cursor.tag or found is None or cursor.tag == tag_of(found.event.event_id)


def _is_the_log(connection: Connection, log: Log, where: str, verdict: Verdict) -> None:
    for item in connection.events:
        sequence = item.cursor.sequence
        if sequence < log.oldest:
            continue
        verdict.expect(item == log.at(sequence), f"{where}: {sequence} is not the event that the log holds there")


def _whole(reader: Reader, log: Log, verdict: Verdict) -> None:
    got = {item.cursor.sequence for connection in reader.connections for item in connection.events}
    begin = _begin(reader)
    if begin is None:
        return
    missing = [sequence for sequence in range(max(begin, log.oldest), log.last + 1) if sequence not in got]
    verdict.expect(not missing, f"{reader.session}: a reader never got {missing[:10]} of {log.last}")


def _begin(reader: Reader) -> int | None:
    """The first sequence it was to get; None where that was never fixed: at the tail, before the first `ready`."""
    for connection in reader.connections:
        if connection.after is not None:
            return connection.after.sequence + 1
        for item in connection.items:
            if item.HasField("ready"):
                return item.ready.through + 1
    return None
