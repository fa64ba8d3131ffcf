"""H3 once: who obeys the cursor rule applies each event once, over reconnects, replicas and retries."""

from __future__ import annotations

from tests.checkers.verdict import Verdict
from tests.support.recording import Reader, Recording


def check(recording: Recording) -> Verdict:
    """Over all connections of a reader the sequences only grow and no id comes twice; in a log no id stands twice."""
    verdict = Verdict()
    for reader in recording.readers:
        _reader(reader, verdict)
    for key, log in recording.logs.items():
        ids: set[str] = set()
        for item in log.items:
            event_id = item.event.event_id.lower()
            verdict.expect(event_id not in ids, f"log of {key}: {event_id} stands twice")
            ids.add(event_id)
    return verdict


def _reader(reader: Reader, verdict: Verdict) -> None:
    before = 0
    ids: set[str] = set()
    for number, connection in enumerate(reader.connections):
        for item in connection.events:
            sequence, event_id = item.cursor.sequence, item.event.event_id.lower()
            verdict.expect(
                sequence > before and event_id not in ids,
                f"{reader.session} connection {number}: {sequence} ({event_id}) came before",
            )
            before = max(before, sequence)
            ids.add(event_id)
