"""C5 approved once: an approved action is handed to the agent at most once; anything not approved never."""

from __future__ import annotations

from collections import Counter, defaultdict

from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import event_pb2
from tests.checkers.verdict import Verdict
from tests.support.control_recording import ControlRecording, endings, started
from tests.support.recording import Key

_APPROVAL = event_pb2.INTERACTION_KIND_APPROVAL
_ALLOWED = event_pb2.DECISION_ALLOWED
_CONSUMED = event_pb2.INTERACTION_RESOLUTION_CONSUMED
_POLICY = event_pb2.INTERACTION_RESOLUTION_POLICY


def check(recording: ControlRecording) -> Verdict:
    """Whoever allowed it did so, for this very call, and it was used once: by the log, and by what agents wrote down.

    Approvals that the policy of a session gives are told to readers as resolved and asked of nobody.
    """
    verdict = Verdict()
    for key in recording.rows:
        _resolutions(recording, key, verdict)
        _continuations(recording, key, verdict)
    roots = _roots(recording)
    leaves = _leaves(recording, roots)
    used = Counter(
        (roots.get(told.execution_id, told.execution_id), told.tool) for told in recording.told if told.allowed
    )
    for what, times in used.items():
        if recording.policy_allows and not leaves[what]:
            # What a policy gave is told to readers in passing, which a crash may lose.
            continue
        verdict.expect(
            times <= leaves[what], f"{what[0]}: leave for {what[1]} was handed over {times} times, given {leaves[what]}"
        )
    ran = Counter((one.execution_id, one.tool_call_id) for one in recording.ran)
    for call, times in ran.items():
        verdict.expect(times == 1, f"{call[0]}: tool call {call[1]} ran {times} times")
    return verdict


def _resolutions(recording: ControlRecording, key: Key, verdict: Verdict) -> None:
    """In the log: asked, then answered, then resolved, and the decision is the one that was accepted."""
    asked: dict[str, event_pb2.InteractionRequested] = {}
    decisions: dict[str, event_pb2.InteractionAnswered] = {}
    accepted: dict[str, set[int]] = defaultdict(set)
    consumed: Counter[str] = Counter()
    # Tool and decision of what was passed on and may be used for the same call once.
    handed: list[tuple[str, int]] = []
    tools = _tools(recording.events(key))
    for _, request in recording.possible(key, calls.AnswerInteractionsRequest):
        for answer in request.answers:
            accepted[answer.interaction_id].add(answer.decision)
    for event in recording.events(key):
        if event.HasField("interaction_requested"):
            asked[event.interaction_requested.interaction_id] = event.interaction_requested
        elif event.HasField("interaction_answered"):
            told = event.interaction_answered
            what = f"{key}: the answer to {told.interaction_id}"
            verdict.expect(told.interaction_id in asked, f"{what} is to nothing that was asked")
            verdict.expect(told.decision in accepted[told.interaction_id], f"{what} was given by nobody")
            decisions[told.interaction_id] = told
        elif event.HasField("interaction_resolved"):
            resolved = event.interaction_resolved
            if resolved.resolution != _CONSUMED:
                continue
            interaction_id = resolved.interaction_id
            consumed[interaction_id] += 1
            what = f"{key}: {interaction_id} was consumed"
            about = asked.get(interaction_id)
            if about is None:
                # The very call that was decided about before, asked for once more by who was told so in words.
                tool = tools.get((event.execution_id, resolved.tool_call_id), "")
                again = next((one for one in handed if one[1] == resolved.decision and tool in ("", one[0])), None)
                verdict.expect(again is not None, f"{what}, never asked, and nobody has decided about such a call")
                if again is not None:
                    handed.remove(again)
                continue
            answer_given = decisions.get(interaction_id)
            verdict.expect(answer_given is not None, f"{what} and never answered")
            verdict.expect(
                answer_given is None or answer_given.decision == resolved.decision, f"{what} with another decision"
            )
            verdict.expect(about.tool_call_id == resolved.tool_call_id, f"{what} for another tool call")
            handed.append((about.tool_name, resolved.decision))
    for interaction_id, times in consumed.items():
        verdict.expect(times == 1, f"{key}: {interaction_id} was consumed {times} times")
    for interaction_id, row in recording.rows[key].interactions.items():
        if recording.settled and row.state == sessions.INTERACTION_STATE_CONSUMED:
            verdict.expect(consumed[interaction_id] == 1, f"{key}: {interaction_id} is consumed, readers do not know")


def _roots(recording: ControlRecording) -> dict[str, str]:
    """Of each execution that goes on with another the one that this began with: what one asked the next may use."""
    found: dict[str, str] = {}
    for key in recording.rows:
        for event in started(recording.events(key)):
            source = event.execution_started.source_execution_id
            if source:
                found[event.execution_id] = found.get(source, source)
    return found


def _tools(events: list[event_pb2.Event]) -> dict[tuple[str, str], str]:
    """The name of the tool of each call, by execution and call."""
    return {
        (event.execution_id, event.tool_completed.tool_call_id): event.tool_completed.name
        for event in events
        if event.HasField("tool_completed")
    }


def _leaves(recording: ControlRecording, roots: dict[str, str]) -> Counter[tuple[str, str]]:
    """How often each tool may be allowed to an execution, or those that go on with it: once for each leave used."""
    found: Counter[tuple[str, str]] = Counter()
    for key in recording.rows:
        events = recording.events(key)
        askers = {name: row.execution_id for name, row in recording.rows[key].interactions.items()}
        tools = _tools(events)
        asked: dict[str, tuple[str, str]] = {}
        running = ""
        for event in events:
            if event.type == "execution.started":
                running = event.execution_id
            elif event.HasField("interaction_requested"):
                about = event.interaction_requested
                asked[about.interaction_id] = (askers.get(about.interaction_id, running), about.tool_name)
            elif event.HasField("interaction_resolved"):
                resolved = event.interaction_resolved
                if resolved.decision != _ALLOWED or resolved.resolution not in (_CONSUMED, _POLICY):
                    continue
                if resolved.resolution == _CONSUMED and resolved.interaction_id not in asked:
                    # Leave that was given before, and counts there.
                    continue
                by_policy = (event.execution_id, tools.get((event.execution_id, resolved.tool_call_id), ""))
                execution_id, tool = asked.get(resolved.interaction_id, by_policy)
                found[roots.get(execution_id, execution_id), tool] += 1
    return found


def _continuations(recording: ControlRecording, key: Key, verdict: Verdict) -> None:
    """What was answered goes on once, and only behind an execution that was paused."""
    events = recording.events(key)
    ended = endings(events)
    sources = Counter(
        event.execution_started.source_execution_id
        for event in started(events)
        if event.execution_started.source_execution_id
    )
    for source, times in sources.items():
        verdict.expect(times == 1, f"{key}: {source} was continued {times} times")
        before = ended.get(source)
        verdict.expect(
            before is not None and before.type == "execution.paused", f"{key}: {source} was continued, and not paused"
        )
