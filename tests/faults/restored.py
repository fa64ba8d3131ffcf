"""What a database that was restored from an older copy does to a recording: what was acknowledged meanwhile is lost,
and whoever was shown some of it must be told."""

from __future__ import annotations

from collections.abc import Sequence

from tests.checkers.verdict import Verdict
from tests.support.recording import Log, Reader, Recording

# After these a reader drops what it has and begins anew.
RELOAD = frozenset({"LOG_REPLACED", "CURSOR_AHEAD"})


def forget(recording: Recording, since: float, until: float) -> None:
    """Take back the answers that came between the copy and the restore: nobody promises them any more."""
    for append in recording.appends:
        if since <= append.answered_at <= until:
            append.answered, append.answered_at, append.result = 0, 0.0, None


def sort(recording: Recording, followers: Sequence[Sequence[Reader]]) -> tuple[Recording, Verdict]:
    """Add the readers to the recording; those that were shown something lost go into another one, which is returned.

    Each follower is the lives of one reader, anew after each time that it was told to load again. Whoever was shown
    something that the logs of the recording do not hold was told so, and got nothing of them on top of it.
    """
    verdict = Verdict()
    lost = Recording(appends=recording.appends, publishes=recording.publishes, outages=recording.outages)
    for lives in followers:
        for life in lives:
            log = recording.logs[life.session]
            at = _first_lost(life, log)
            if at is None and not _told(life) and not _stood_in_the_lost(life, log):
                recording.readers.append(life)
                continue
            lost.readers.append(life)
            # Without a place it was shown no such event: it stood behind one, or what it had was lost and then written
            # again by a producer that had got no answer.
            if at is not None:
                _check(life, log, at, verdict, last=life is lives[-1])
    return lost, verdict


def _told(life: Reader) -> bool:
    refusal = life.connections[-1].refusal if life.connections else None
    return refusal is not None and refusal.reason in RELOAD


def _stood_in_the_lost(life: Reader, log: Log) -> bool:
    """Whether it came at a place that the log does not have: one at the tail gets frames there, and maybe no event."""
    places = [connection.after for connection in life.connections if connection.after is not None]
    places += [
        item.ready.cursor for connection in life.connections for item in connection.items if item.HasField("ready")
    ]
    for place in places:
        found = log.at(place.sequence)
        if place.tag and (found is None or found.cursor.tag != place.tag):
            return True
    return False


def _first_lost(life: Reader, log: Log) -> tuple[int, int] | None:
    """Connection and sequence of the first event that the log does not hold."""
    for number, connection in enumerate(life.connections):
        for item in connection.events:
            if item != log.at(item.cursor.sequence):
                return number, item.cursor.sequence
    return None


def _check(life: Reader, log: Log, at: tuple[int, int], verdict: Verdict, *, last: bool) -> None:
    number, sequence = at
    where = f"{life.session[1]}: a reader that was shown {sequence}, which is lost,"
    later = [item for item in life.connections[number].events if item.cursor.sequence > sequence]
    later += [item for connection in life.connections[number + 1 :] for item in connection.events]
    mixed = [item.cursor.sequence for item in later if item == log.at(item.cursor.sequence)]
    verdict.expect(not mixed, f"{where} got {mixed[:5]} of the other log on top")
    # A visitor may have gone before it could be told.
    verdict.expect(_told(life) or last, f"{where} was not told")
