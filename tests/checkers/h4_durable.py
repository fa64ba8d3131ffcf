"""H4 durable ack: what was acknowledged, or shown to anybody, is stored for good."""

from __future__ import annotations

from hearth.history.v1 import history_pb2
from tests.checkers.verdict import Verdict
from tests.support.recording import STORED, Append, Log, Recording, content_of


def check(recording: Recording) -> Verdict:
    """Each acknowledged event stands in the log at the sequence it was told, byte for byte as it was sent."""
    verdict = Verdict()
    for append in recording.appends:
        log = recording.logs.get(append.session)
        if log is not None:
            _acknowledged(append, log, verdict)
    for reader in recording.readers:
        log = recording.logs.get(reader.session)
        if log is None:
            continue
        for connection in reader.connections:
            for item in connection.events:
                sequence = item.cursor.sequence
                verdict.expect(sequence <= log.last, f"{reader.session}: {sequence} was shown and is not in the log")
    return verdict


def _acknowledged(append: Append, log: Log, verdict: Verdict) -> None:
    result = append.result
    if result is None or not result.sequence or result.outcome not in STORED or result.sequence < log.oldest:
        return
    event = append.event
    what = f"{append.session}: {event.type} {event.event_id}, acknowledged at {result.sequence},"
    found = log.at(result.sequence)
    if found is None:
        verdict.expect(False, f"{what} is lost")
    elif result.outcome == history_pb2.APPEND_OUTCOME_APPENDED:
        verdict.expect(found.event == event, f"{what} is stored as {found.event.type} {found.event.event_id}")
    else:
        same = found.event.event_id.lower() == event.event_id.lower() and content_of(found.event) == content_of(event)
        verdict.expect(same, f"{what} is stored as {found.event.type} {found.event.event_id}")
