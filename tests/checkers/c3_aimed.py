"""C3 aimed: a Stop never ends an execution that its sender could not have meant."""

from __future__ import annotations

from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import event_pb2
from tests.checkers.verdict import Verdict
from tests.support.control_recording import ControlRecording, endings, started
from tests.support.recording import Key

# Endings that a cancel of a user, or one for a steer, leads to.
_ASKED_FOR = frozenset({"user", "steer", "runner lost"})


def check(recording: ControlRecording) -> Verdict:
    """Each stopped execution was meant by somebody, and each accepted Stop is aimed at what it named."""
    verdict = Verdict()
    for key in recording.rows:
        events = recording.events(key)
        epochs = _admitted_at(events)
        for call, request in recording.accepted(calls.StopExecutionRequest):
            if call.session == key:
                assert isinstance(call.response, calls.StopExecutionResponse)
                _aim(call.response.command, request, epochs, key, verdict)
        for ending in endings(events).values():
            if ending.HasField("execution_stopped"):
                _cause(recording, key, ending, epochs, verdict)
    return verdict


def _admitted_at(events: list[event_pb2.Event]) -> dict[str, int]:
    """The first epoch of each execution."""
    found: dict[str, int] = {}
    for event in started(events):
        found.setdefault(event.execution_id, event.epoch)
    return found


def _aim(
    command: sessions.Command, request: calls.StopExecutionRequest, epochs: dict[str, int], key: Key, verdict: Verdict
) -> None:
    target = command.execution_id
    what = f"{key}: Stop {request.request_id!r}"
    if request.execution_id:
        verdict.expect(target in ("", request.execution_id), f"{what} meant {request.execution_id}, and hit {target}")
    elif target:
        epoch = epochs.get(target)
        verdict.expect(epoch is not None, f"{what} hit {target}, which never was")
        verdict.expect(
            epoch is None or epoch <= request.seen_epoch,
            f"{what} had seen epoch {request.seen_epoch}, and hit {target} of epoch {epoch}",
        )


def _cause(
    recording: ControlRecording, key: Key, ending: event_pb2.Event, epochs: dict[str, int], verdict: Verdict
) -> None:
    execution_id, stopped = ending.execution_id, ending.execution_stopped
    what = f"{key}: {execution_id} was stopped ({stopped.reason})"
    stops = any(
        request.execution_id == execution_id
        or (not request.execution_id and epochs.get(execution_id, 0) <= request.seen_epoch)
        for _, request in recording.possible(key, calls.StopExecutionRequest)
    )
    steers = any(True for _ in recording.possible(key, calls.SendInputNowRequest)) or any(
        request.on_busy == sessions.ON_BUSY_STEER for _, request in recording.possible(key, calls.SendInputRequest)
    )
    kills = any(True for _ in recording.possible(key, calls.KillSessionRequest))
    match stopped.reason:
        case "user":
            verdict.expect(stops, f"{what}, and no Stop can have meant it")
        case "steer":
            verdict.expect(steers, f"{what}, and nobody steered")
        case "killed":
            verdict.expect(kills, f"{what}, and nobody killed the session")
        case "shutdown":
            verdict.expect(recording.shutdowns > 0, f"{what}, and no pool was told to end")
        case "runner lost":
            verdict.expect(stops or steers, f"{what}, and nobody had asked for that")
        case _:
            verdict.expect(False, f"{what}, for a reason that is none")
    command = recording.rows[key].commands.get(stopped.command_id)
    if stopped.reason in _ASKED_FOR:
        verdict.expect(
            command is not None and command.execution_id == execution_id,
            f"{what} by {stopped.command_id!r}, which is aimed at {command.execution_id if command else 'nothing'}",
        )
