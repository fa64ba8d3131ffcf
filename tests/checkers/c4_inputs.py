"""C4 no input lost or doubled: each accepted input is started once, removed by its owner, or visible as waiting."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import event_pb2
from tests.checkers.c1_durable import made_by
from tests.checkers.verdict import Verdict
from tests.support.control_recording import ControlRecording, endings, started
from tests.support.recording import Key

# By these an agent must have had the prompt.
_ANSWERED = frozenset({"execution.completed", "execution.paused"})


def check(recording: ControlRecording) -> Verdict:
    """By the log, by what the pool shows and by what agents wrote down.

    The order of the queue is kept for inputs that were neither sent as a steer nor sent now.
    """
    verdict = Verdict()
    handed = Counter(prompt.execution_id for prompt in recording.prompts)
    for execution_id, times in handed.items():
        verdict.expect(times == 1, f"the prompt of {execution_id} was handed over {times} times")
    for key, rows in recording.rows.items():
        events = recording.events(key)
        runs: dict[str, set[str]] = defaultdict(set)
        for event in started(events):
            if event.execution_started.input_id:
                runs[event.execution_started.input_id].add(event.execution_id)
        removed = {event.input_removed.input_id for event in events if event.HasField("input_removed")}
        waiting = [row.input_id for row in rows.waiting if row.state == sessions.INPUT_STATE_PENDING]
        verdict.expect(len(waiting) == len(set(waiting)), f"{key}: an input is listed twice")
        for input_id, executions in runs.items():
            verdict.expect(len(executions) == 1, f"{key}: {input_id} was started {len(executions)} times")
        if recording.settled:
            for call, request in recording.accepted(calls.SendInputRequest):
                if call.session == key:
                    input_id = made_by(call)
                    places = [input_id in runs, input_id in removed, input_id in waiting]
                    where = ", ".join(
                        name for name, there in zip(("started", "removed", "waiting"), places, strict=True) if there
                    )
                    verdict.expect(
                        places.count(True) == 1,
                        f"{key}: input {input_id} of {request.request_id!r} is {where or 'lost'}",
                    )
            _owned_removals(recording, key, events, verdict)
        _by_its_agent(key, events, handed, verdict)
        _in_order(recording, key, events, verdict)
    return verdict


def _owned_removals(recording: ControlRecording, key: Key, events: list[event_pb2.Event], verdict: Verdict) -> None:
    asked = {request.input_id for _, request in recording.possible(key, calls.RemoveInputRequest)}
    killed = any(True for _ in recording.possible(key, calls.KillSessionRequest))
    for event in events:
        if event.HasField("input_removed"):
            gone = event.input_removed
            owned = gone.input_id in asked if gone.reason == "user" else killed
            verdict.expect(owned, f"{key}: {gone.input_id} was removed ({gone.reason}), and nobody asked for that")


def _by_its_agent(key: Key, events: list[event_pb2.Event], handed: Counter[str], verdict: Verdict) -> None:
    for execution_id, ending in endings(events).items():
        if ending.type in _ANSWERED:
            verdict.expect(
                handed[execution_id] == 1, f"{key}: {execution_id} has {ending.type}, and no agent had its prompt"
            )


def _in_order(recording: ControlRecording, key: Key, events: list[event_pb2.Event], verdict: Verdict) -> None:
    """What waited runs in the order in which it came, unless somebody wanted it otherwise."""
    jumped = {request.input_id for _, request in recording.possible(key, calls.SendInputNowRequest)}
    for call, request in recording.possible(key, calls.SendInputRequest):
        if request.on_busy == sessions.ON_BUSY_STEER:
            jumped.add(made_by(call))
    queued = [
        event.input_queued.input_id
        for event in events
        if event.HasField("input_queued") and not event.input_queued.steer
    ]
    promoted = [event.input_promoted.input_id for event in events if event.HasField("input_promoted")]
    place = {input_id: number for number, input_id in enumerate(queued)}
    ordered = [input_id for input_id in promoted if input_id in place and input_id not in jumped]
    for before, after in itertools.pairwise(ordered):
        verdict.expect(place[before] < place[after], f"{key}: {after} came before {before}, and ran after it")
