"""The cursor rule, on which H3 stands: only a delivered event moves the cursor, and each event carries its own."""

from __future__ import annotations

from hearth.relay.v1 import relay_pb2
from tests.checkers.verdict import Verdict
from tests.support.recording import Connection, Reader, Recording, tag_of


def check(recording: Recording) -> Verdict:
    """What names a place names the last event delivered, or where the request began; never the head.

    A refusal with a cursor, a `ready`, a heartbeat and a `closing` are such names. All events are of one log.
    """
    verdict = Verdict()
    for reader in recording.readers:
        log_ids: set[str] = set()
        for number, connection in enumerate(reader.connections):
            where = f"{reader.session} connection {number}"
            least = _acknowledged(recording, reader, connection.began)
            at = _connection(connection, least, where, log_ids, verdict)
            _refusal(connection, at, least, where, log_ids, verdict)
        verdict.expect(len(log_ids) <= 1, f"{reader.session}: places in {len(log_ids)} logs")
        _resumes(reader, verdict)
    return verdict


def _connection(connection: Connection, least: int, where: str, log_ids: set[str], verdict: Verdict) -> int | None:
    """Checks what was delivered; the last place that was named, None where none was.

    A tail begins at `least` or later.
    """
    at = connection.after.sequence if connection.after is not None else None
    for item in connection.items:
        kind = item.WhichOneof("item")
        if kind == "event":
            cursor = item.event.cursor
            at = cursor.sequence
            log_ids.add(cursor.log_id)
            verdict.expect(
                cursor.tag == tag_of(item.event.event.event_id), f"{where}: the tag at {at} is not that of the event"
            )
            continue
        named = _place_named(item)
        if named is None:
            continue
        if at is None and kind == "ready":
            # What `tail` means is told by its `ready`: nothing that was there before it.
            at = named
            verdict.expect(named >= least, f"{where}: the tail begins at {named}, and not at {least} or later")
        verdict.expect(named == at, f"{where}: {kind} names {named}, delivered was {at}")
        if kind in ("ready", "heartbeat"):
            known = item.ready.head if kind == "ready" else item.heartbeat.head
            verdict.expect(known >= named, f"{where}: {kind} knows a head {known} below {named}")
    return at


def _refusal(
    connection: Connection, at: int | None, least: int, where: str, log_ids: set[str], verdict: Verdict
) -> None:
    if connection.refusal is None or "sequence" not in connection.refusal.metadata:
        return
    told = int(connection.refusal.metadata["sequence"])
    log_ids |= {connection.refusal.metadata.get("log_id", "")} - {""}
    if at is None:
        # The `ready` of a tail may be lost on its way.
        verdict.expect(
            told >= least, f"{where}: the error says to resume at {told}, the tail began at {least} or later"
        )
    else:
        verdict.expect(told == at, f"{where}: the error says to resume at {told}, delivered was {at}")


def _acknowledged(recording: Recording, reader: Reader, tick: int) -> int:
    """The highest sequence of the session of which somebody had been told before `tick`."""
    known = (
        append.result.sequence
        for append in recording.appends
        if append.session == reader.session and append.result is not None and 0 < append.answered < tick
    )
    return max(known, default=0)


def _place_named(item: relay_pb2.Item) -> int | None:
    match item.WhichOneof("item"):
        case "ready":
            return item.ready.through if item.ready.through == item.ready.cursor.sequence else -1
        case "heartbeat":
            return item.heartbeat.through
        case "closing":
            return item.closing.cursor.sequence if item.closing.HasField("cursor") else None
    return None


def _resumes(reader: Reader, verdict: Verdict) -> None:
    """The reader itself obeys: each connection begins where the one before had got to."""
    at = None
    for number, connection in enumerate(reader.connections):
        after = connection.after
        if at is not None and after is not None:
            verdict.expect(
                after.sequence == at, f"{reader.session} connection {number}: asked from {after.sequence}, had {at}"
            )
        for item in connection.items:
            if item.HasField("event"):
                at = item.event.cursor.sequence
            elif item.HasField("ready") and connection.after is None and at is None:
                at = item.ready.through
