"""H6 one ending, as the pool tells it: each accepted execution is opened once, and settled by its ending in the log."""

from __future__ import annotations

from collections import Counter

from hearth.session.v1 import session_pb2 as sessions
from tests.checkers.c2_one_winner import OUTCOMES
from tests.checkers.verdict import Verdict
from tests.support.control_recording import ControlRecording, endings, messages_in, started
from tests.support.recording import ENDINGS, Key

_TERMINAL = sessions.EXECUTION_STATE_TERMINAL


def check(recording: ControlRecording) -> Verdict:
    """The rows and the log agree. In a run that settled, every execution that anybody was told of has its ending."""
    verdict = Verdict()
    for key, rows in recording.rows.items():
        events = recording.events(key)
        ended = endings(events)
        opened = Counter(event.execution_id for event in started(events))
        for execution_id, times in opened.items():
            verdict.expect(times == 1, f"{key}: {execution_id} was opened {times} times")
        closed = Counter(event.execution_id for event in events if event.type in ENDINGS)
        for execution_id, times in closed.items():
            verdict.expect(times == 1, f"{key}: {execution_id} was ended {times} times")
            verdict.expect(execution_id in opened, f"{key}: {execution_id} was ended, and never opened")
        for execution_id in _told_of(recording, key) | set(opened):
            row = rows.executions.get(execution_id)
            verdict.expect(row is not None, f"{key}: {execution_id} is not known any more")
            if row is None:
                continue
            event = ended.get(execution_id)
            if row.state == _TERMINAL:
                verdict.expect(event is not None, f"{key}: {execution_id} is settled, and has no ending")
            elif recording.settled:
                verdict.expect(False, f"{key}: {execution_id} is {sessions.ExecutionState.Name(row.state)} for ever")
            if event is not None and (row.state == _TERMINAL or recording.settled):
                verdict.expect(
                    row.outcome == OUTCOMES[event.type], f"{key}: {execution_id} is settled by another ending"
                )
                _place(recording, key, row, verdict)
        active = [row for row in rows.executions.values() if row.state != _TERMINAL]
        verdict.expect(len(active) <= 1, f"{key}: {len(active)} executions are under way at once")
    return verdict


def _told_of(recording: ControlRecording, key: Key) -> set[str]:
    return {
        execution.execution_id
        for call in recording.calls
        if call.session == key and call.response is not None
        for execution in messages_in(call.response, sessions.Execution)
    }


def _place(recording: ControlRecording, key: Key, row: sessions.Execution, verdict: Verdict) -> None:
    item = recording.logs[key].at(row.ending_sequence) if key in recording.logs else None
    verdict.expect(
        item is not None and item.event.execution_id == row.execution_id and item.event.type in ENDINGS,
        f"{key}: {row.execution_id} is said to end at {row.ending_sequence}, where it does not",
    )
