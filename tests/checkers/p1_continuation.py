"""P1 right continuation: a live agent takes the next turn only if configuration, history and credentials are those it
has; else the turn starts cold."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import content_pb2, event_pb2
from tests.checkers.c1_durable import made_by
from tests.checkers.verdict import Verdict
from tests.support.control_recording import Call, ControlRecording, Prompt, endings, started
from tests.support.recording import Key

_USER = "User: "
_CUT = "[earlier parts of the conversation are left out]"


@dataclass(frozen=True)
class _Turn:
    """An execution in its session. `place` counts those of the session from 0; `spec` is the one in force, None where
    nobody knows; `text` is its message, empty for a continuation; `since`: it did not begin before."""

    key: Key
    place: int
    spec: sessions.SessionSpec | None
    text: str
    since: float
    summary: event_pb2.EndingSummary | None


def check(recording: ControlRecording) -> Verdict:
    """By what agents wrote down when they were opened and each time they were asked, against the logs and the calls.

    A spec is compared as it was sent: one that writes a default out counts as another one. Limits do not count.
    """
    verdict = Verdict()
    turns = {name: turn for key in recording.rows for name, turn in _turns(recording, key)}
    lived: dict[tuple[int, float], list[Prompt]] = defaultdict(list)
    records: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in recording.turns:
        if prompt.execution_id not in turns and not recording.settled:
            continue
        records[prompt.record].append(prompt)
        if prompt.opened is not None:
            lived[prompt.opened.process].append(prompt)
        elif prompt.execution_id in turns:
            verdict.expect(False, f"{prompt.execution_id}: its agent was asked, and was never opened")
    for process, prompts in lived.items():
        if _one_conversation(f"process {process[0]}", prompts, turns, verdict):
            _one_after_the_other(process[0], prompts, turns, verdict)
    for record, prompts in records.items():
        if _one_conversation(f"record {record}", prompts, turns, verdict):
            _knows_all(prompts, turns, verdict)
    _opened_with(recording, turns, verdict)
    return verdict


def _turns(recording: ControlRecording, key: Key) -> Iterator[tuple[str, _Turn]]:
    """The executions of a session, in the order in which they began."""
    events = recording.events(key)
    ended = endings(events)
    says = {
        event.execution_id: _words(event.message_completed.content)
        for event in events
        if event.HasField("message_completed") and event.message_completed.role == content_pb2.ROLE_USER
    }
    firsts: dict[str, Call] = {}
    made: dict[str, Call] = {}
    for call, request in recording.possible(key, calls.SendInputRequest):
        first = firsts.setdefault(request.request_id, call)
        # Of what was never answered only the words are known.
        made.setdefault(made_by(call) if call.accepted else _words(request.content), first)
    spec: sessions.SessionSpec | None = sessions.SessionSpec()
    for place, (name, event) in enumerate({event.execution_id: event for event in started(events)}.items()):
        begun = event.execution_started
        sent = made.get(begun.input_id) or made.get(says.get(name, ""))
        if begun.input_id and sent is None:
            spec = None
        elif sent is not None and isinstance(sent.request, calls.SendInputRequest) and sent.request.HasField("spec"):
            spec = sent.request.spec
        body = ended[name].WhichOneof("body") if name in ended else None
        yield (
            name,
            _Turn(
                key,
                place,
                _applied(spec, begun.agent) if spec is not None else None,
                says.get(name, ""),
                sent.began_at if sent is not None else 0.0,
                getattr(getattr(ended[name], body), "summary", None) if body else None,
            ),
        )


def _one_conversation(what: str, prompts: Sequence[Prompt], turns: Mapping[str, _Turn], verdict: Verdict) -> bool:
    """Whether all of it is of one session of the run, of which there is something."""
    found = {turns[one.execution_id].key if one.execution_id in turns else None for one in prompts}
    if found == {None}:
        return False
    asked = ", ".join(one.execution_id for one in prompts)
    verdict.expect(len(found) == 1, f"{what} was asked in several sessions: {asked}")
    return len(found) == 1


def _one_after_the_other(pid: int, prompts: Sequence[Prompt], turns: Mapping[str, _Turn], verdict: Verdict) -> None:
    """What one process was asked is what the log has, without a hole and under one spec, and endings tell of it."""
    before: _Turn | None = None
    for prompt in prompts:
        turn = turns[prompt.execution_id]
        what = f"{turn.key}: {prompt.execution_id}"
        if before is not None:
            verdict.expect(
                turn.place == before.place + 1, f"{what} went to process {pid}, which does not know the turn before it"
            )
            if before.spec is not None and turn.spec is not None:
                verdict.expect(turn.spec == before.spec, f"{what} went to process {pid}, opened for another spec")
        if turn.summary is not None and turn.summary.how:
            how = turn.summary.how
            verdict.expect(
                (how == "warm") == (before is not None),
                f"{what} is said to be {how}, and process {pid} had {'some' if before else 'no'} turn before",
            )
        if turn.summary is not None and turn.summary.agent_report_json:
            told = json.loads(turn.summary.agent_report_json).get("hearth.dev/agent", {}).get("pid")
            verdict.expect(told == pid, f"{what} is answered by process {told}, and process {pid} was asked")
        if before is not None and before.summary is not None and turn.summary is not None:
            places = {one for one in (before.summary.sandbox_id, turn.summary.sandbox_id) if one}
            verdict.expect(len(places) < 2, f"{what} went to process {pid}, which is in another sandbox")
        before = turn


def _knows_all(prompts: Sequence[Prompt], turns: Mapping[str, _Turn], verdict: Verdict) -> None:
    """Each time it is asked an agent knows every message before, and no other: it was asked that, or is told."""
    known: set[str] = set()
    # Of a conversation that is too long for an agent, the place from which on it was told.
    first = 0
    for prompt in prompts:
        turn = turns[prompt.execution_id]
        wrong = []
        what = f"{turn.key}: the agent of {prompt.execution_id}"
        before = {name: one for name, one in turns.items() if one.key == turn.key and one.place < turn.place}
        parts = prompt.context.split("\n\n")
        told = {part.removeprefix(_USER) for part in parts if part.startswith(_USER)}
        known |= {name for name, one in before.items() if one.text in told}
        if _CUT in parts:
            first = min((turns[name].place for name in known), default=turn.place)
        missing = [name for name, one in before.items() if one.text and one.place >= first and name not in known]
        if missing:
            wrong.append(f"{what} does not know {', '.join(missing)}")
        if strange := told - {one.text for one in before.values()}:
            wrong.append(f"{what} is told what nobody said before: {sorted(strange)}")
        if not prompt.text.endswith(turn.text):
            wrong.append(f"{what} is asked {prompt.text!r} instead of {turn.text!r}")
        known.add(prompt.execution_id)
        verdict.also(wrong)


def _opened_with(recording: ControlRecording, turns: Mapping[str, _Turn], verdict: Verdict) -> None:
    """Whoever is asked was opened with what the spec in force says, and with the values that it binds by now."""
    asked_at: dict[Key, float] = defaultdict(float)
    for prompt in recording.turns:
        turn = turns.get(prompt.execution_id)
        if turn is None:
            continue
        # What an agent is given is looked up after the turn was asked for, and after the one before it.
        since, asked_at[turn.key] = max(turn.since, asked_at[turn.key]), prompt.at
        if prompt.opened is None or turn.spec is None:
            continue
        what, opened, spec = f"{turn.key}: the agent of {prompt.execution_id}", prompt.opened, turn.spec
        verdict.expect(
            (opened.instructions, opened.model) == (spec.instructions, spec.model),
            f"{what} has {(opened.instructions, opened.model)}, wanted is {(spec.instructions, spec.model)}",
        )
        has = [(one["name"], one["where"], one["names"]) for one in opened.servers]
        verdict.expect(has == _servers(spec), f"{what} has the MCP servers {has}, wanted are {_servers(spec)}")
        holders = [(spec.credentials, opened.values)]
        for server, shown in zip(spec.mcp_servers, opened.servers, strict=False):
            holders.append((getattr(server, server.WhichOneof("transport") or "").credentials, shown["values"]))
        for bindings, values in holders:
            bound = {one.target: one.credential for one in bindings}
            for target in sorted({*bound, *values}):
                value = values.get(target)
                may: set[str | None] = {None}
                if target in bound:
                    may = _may_be(recording, turn.key[0], bound[target], since, prompt.at)
                verdict.expect(not may or value in may, f"{what} has another value in {target} than it is to have")


def _may_be(recording: ControlRecording, project: str, name: str, since: float, until: float) -> set[str | None]:
    """What a credential may have been at a moment between these times; empty where nobody stored it in this run."""
    writes = [
        (call, call.request)
        for call in recording.calls
        if isinstance(call.request, (calls.PutCredentialRequest, calls.DeleteCredentialRequest))
        and (call.request.project, call.request.name) == (project, name)
        and call.may_have_happened
    ]
    over = [call.began_at for call, _ in writes if call.accepted and call.answered_at <= since]
    return {
        request.value
        for call, request in writes
        if isinstance(request, calls.PutCredentialRequest)
        and call.began_at <= until
        and not (call.answered and any(call.answered_at < later for later in over))
    }


def _servers(spec: sessions.SessionSpec) -> list[tuple[str, object, list[str]]]:
    found: list[tuple[str, object, list[str]]] = []
    for server in spec.mcp_servers:
        plain, where = (
            (server.http.headers, server.http.url)
            if server.HasField("http")
            else (server.stdio.env, list(server.stdio.command))
        )
        bound = getattr(server, server.WhichOneof("transport") or "").credentials
        found.append((server.name, where, sorted({*plain, *(one.target for one in bound)})))
    return found


def _applied(spec: sessions.SessionSpec, agent: str) -> sessions.SessionSpec:
    found = sessions.SessionSpec()
    found.CopyFrom(spec)
    found.agent = agent
    found.ClearField("limits")
    return found


def _words(content: Iterable[content_pb2.ContentPart]) -> str:
    return "\n".join(part.text.text for part in content)
