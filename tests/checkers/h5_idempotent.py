"""H5 idempotent: the same event again gives the first result; other content under its id changes nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from hearth.history.v1 import history_pb2
from tests.checkers.verdict import Verdict
from tests.support.recording import ASIDE, STORED, Append, Log, Recording, content_of

_APPENDED = history_pb2.APPEND_OUTCOME_APPENDED
_DUPLICATE = history_pb2.APPEND_OUTCOME_DUPLICATE
_CONFLICT = history_pb2.APPEND_OUTCOME_CONFLICT
# Outcomes that say that the event is kept, in the log or aside.
_KEPT = STORED | ASIDE


def check(recording: Recording) -> Verdict:
    """All answers about one id agree with each other, and with what is stored."""
    verdict = Verdict()
    tries: dict[tuple[tuple[str, str], str], list[Append]] = defaultdict(list)
    for append in recording.appends:
        tries[append.session, append.event.event_id.lower()].append(append)
    stored = {key: _kept(log) for key, log in recording.logs.items()}
    for (key, event_id), appends in tries.items():
        answered = [append for append in appends if append.result is not None]
        log = recording.logs.get(key)
        found = stored.get(key, {}).get(event_id)
        contents = {_content(append) for append in appends}
        if found is not None:
            verdict.expect(found in contents, f"{key}: {event_id} is stored with a content that nobody sent")
        _agree(f"{key}: {event_id}", answered, verdict)
        if log is not None and log.oldest == 1:
            _against_stored(f"{key}: {event_id}", answered, found, verdict)
    return verdict


def _content(append: Append) -> bytes:
    return content_of(append.event)


def _kept(log: Log) -> dict[str, bytes]:
    found = {item.event.event_id.lower(): content_of(item.event) for item in log.items}
    for aside in log.quarantined:
        found.setdefault(aside.event.event_id.lower(), content_of(aside.event))
    return found


def _outcome(append: Append) -> history_pb2.AppendResult:
    assert append.result is not None
    return append.result


def _agree(what: str, answered: Sequence[Append], verdict: Verdict) -> None:
    """One place, one content, stored as new at most once, and known as a duplicate from then on."""
    places = {_outcome(append).sequence for append in answered if _outcome(append).outcome in _KEPT}
    verdict.expect(len(places) <= 1, f"{what} was said to be at {sorted(places)}")
    contents = {_content(append) for append in answered if _outcome(append).outcome in _KEPT}
    verdict.expect(len(contents) <= 1, f"{what} was taken with {len(contents)} contents")
    new = [append for append in answered if _outcome(append).outcome in {_APPENDED} | ASIDE]
    verdict.expect(len(new) <= 1, f"{what} was taken as new {len(new)} times")
    for append in answered:
        known = [
            earlier
            for earlier in answered
            if earlier.answered < append.began and _outcome(earlier).outcome in _KEPT and append.sound
        ]
        if known:
            same = _content(known[0]) == _content(append)
            expected = _DUPLICATE if same else _CONFLICT
            outcome = _outcome(append).outcome
            verdict.expect(
                outcome == expected,
                f"{what} was known, and {'the same' if same else 'another content'} was answered"
                f" {history_pb2.AppendOutcome.Name(outcome)}",
            )


def _against_stored(what: str, answered: Sequence[Append], found: bytes | None, verdict: Verdict) -> None:
    for append in answered:
        outcome = _outcome(append).outcome
        if outcome in _KEPT:
            verdict.expect(found == _content(append), f"{what} was taken, and another content or nothing is stored")
        elif outcome == _CONFLICT:
            verdict.expect(
                found is not None and found != _content(append), f"{what} was a conflict, and nothing else is stored"
            )
