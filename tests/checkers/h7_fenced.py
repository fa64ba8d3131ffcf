"""H7 fenced: output of a superseded epoch never enters the log; what of it arrives is kept aside with its reason."""

from __future__ import annotations

from collections.abc import Iterable

from hearth.history.v1 import history_pb2
from hearth.relay.v1 import relay_pb2
from hearth.types.v1 import event_pb2
from tests.checkers.verdict import Verdict
from tests.support.recording import ASIDE, ENDINGS, Append, Key, Log, Recording, runner

_DUPLICATE = history_pb2.APPEND_OUTCOME_DUPLICATE


def check(recording: Recording) -> Verdict:
    """Epochs of runner output never fall and belong to one execution; fenced events are aside, and frames nowhere."""
    verdict = Verdict()
    for reader in recording.readers:
        events = [item.event for connection in reader.connections for item in connection.events]
        _never_falls(events, f"{reader.session} as read", verdict)
    for key, log in recording.logs.items():
        _never_falls((item.event for item in log.items), f"log of {key}", verdict)
        _aside(key, log, verdict)
    for append in recording.appends:
        found = recording.logs.get(append.session)
        if found is not None and append.result is not None:
            _answer(append, append.result, found, verdict)
    _frames(recording, verdict)
    _after_flush(recording, verdict)
    return verdict


def _never_falls(events: Iterable[event_pb2.Event], where: str, verdict: Verdict) -> None:
    epoch, holder = 0, ""
    for event in events:
        if not runner(event):
            continue
        verdict.expect(event.epoch >= epoch, f"{where}: {event.type} of epoch {event.epoch} behind {epoch}")
        verdict.expect(
            event.epoch != epoch or event.execution_id == holder, f"{where}: epoch {epoch} has two executions"
        )
        epoch, holder = event.epoch, event.execution_id


def _aside(key: Key, log: Log, verdict: Verdict) -> None:
    """What is in quarantine is in no log, and belongs there."""
    stored = {item.event.event_id.lower() for item in log.items}
    epochs = {(item.event.epoch, item.event.execution_id) for item in log.items if runner(item.event)}
    ended = {item.event.execution_id for item in log.items if item.event.type in ENDINGS}
    seen: set[str] = set()
    for found in log.quarantined:
        event = found.event
        what = f"{key}: {event.type} {event.event_id}, aside for {found.reason},"
        verdict.expect(event.event_id.lower() not in stored, f"{what} is in the log too")
        verdict.expect(event.event_id.lower() not in seen, f"{what} is there twice")
        seen.add(event.event_id.lower())
        if log.oldest > 1:
            continue
        match found.reason:
            case "EXECUTION_ENDED":
                fair = event.execution_id in ended
            case "STALE_EPOCH":
                fair = any(epoch > event.epoch for epoch, _ in epochs)
            case "EPOCH_TAKEN":
                fair = any(epoch == event.epoch and other != event.execution_id for epoch, other in epochs)
            case _:
                fair = False
        verdict.expect(fair, f"{what} has nothing in the log that supersedes it")


def _answer(append: Append, result: history_pb2.AppendResult, log: Log, verdict: Verdict) -> None:
    """Who was told that its output is kept aside was told the truth."""
    if result.outcome not in ASIDE and not (result.outcome == _DUPLICATE and not result.sequence):
        return
    event_id = append.event.event_id.lower()
    what = f"{append.session}: {append.event.type} {event_id}, fenced for {result.reason},"
    kept = [found for found in log.quarantined if found.event.event_id.lower() == event_id]
    verdict.expect(bool(kept), f"{what} is not in quarantine")
    if kept:
        verdict.expect(kept[0].reason == result.reason, f"{what} is in quarantine for {kept[0].reason}")
    verdict.expect(
        result.current_epoch >= append.event.epoch or result.reason == "EXECUTION_ENDED",
        f"{what} was told the epoch {result.current_epoch}, below its own {append.event.epoch}",
    )


def _after_flush(recording: Recording, verdict: Verdict) -> None:
    """What the relay forgot, history knows: who was superseded or over before a flush publishes nothing after it."""
    for publish in recording.publishes:
        flush = max((before for before, after in recording.flushes if after < publish.began), default=0)
        if publish.result is None or not publish.frames or not flush:
            continue
        superseded = any(
            append.session == publish.session
            and append.result is not None
            and append.answered < flush
            and append.result.sequence
            and runner(append.event)
            and (
                append.event.epoch > publish.epoch
                or (append.event.epoch == publish.epoch and append.event.execution_id != publish.execution_id)
                or (append.event.execution_id == publish.execution_id and append.event.type in ENDINGS)
            )
            for append in recording.appends
        )
        taken = publish.result.outcome == relay_pb2.PUBLISH_OUTCOME_ACCEPTED
        verdict.expect(
            not (superseded and taken),
            f"{publish.session}: frames of epoch {publish.epoch} were taken after a flush, they were superseded before",
        )


def _frames(recording: Recording, verdict: Verdict) -> None:
    """Frames that the relay fenced, and never took from anybody, reach no reader."""
    fenced: set[tuple[Key, str, int, int]] = set()
    other: set[tuple[Key, str, int, int]] = set()
    for publish in recording.publishes:
        result = publish.result
        refused = result is not None and result.outcome == relay_pb2.PUBLISH_OUTCOME_FENCED
        for frame in publish.frames:
            (fenced if refused else other).add(
                (publish.session, publish.execution_id, publish.epoch, frame.frame_index)
            )
    fenced -= other
    verdict.checked += len(fenced)
    for reader in recording.readers:
        for connection in reader.connections:
            for item in connection.items:
                if item.HasField("frame"):
                    got = item.frame
                    name = (reader.session, got.execution_id, got.epoch, got.frame.frame_index)
                    if name in fenced:
                        verdict.wrong.append(f"{name[0]}: frame {name[3]} of epoch {name[2]} was fenced and delivered")
