"""The checker of P1 sees red: a live agent that took a turn of another session, spec, value or conversation, and
endings and prompts that tell of another one."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from tests.checkers import control_pieces as made
from tests.checkers.p1_continuation import check
from tests.checkers.pieces import KEY
from tests.support.control_recording import Call, ControlRecording, Rows

OLD, NEW = "value old", "value new"
KEY_OF_IT = sessions.CredentialBinding(credential="key", target="MODEL_KEY")
HEADER = sessions.CredentialBinding(credential="key", target="X-Key")
NOTES = sessions.McpServer(name="notes", http=sessions.McpHttp(url="http://notes", credentials=[HEADER]))
KEYED = sessions.SessionSpec(model="large", credentials=[KEY_OF_IT], mcp_servers=[NOTES])
BRIEF = sessions.SessionSpec(instructions="Be brief.")
# Of each turn its spec, if it brings one, how it began, and the process and the record of its agent.
TURNS = [(KEYED, "cold", 1, "r"), (None, "warm", 1, "r"), (BRIEF, "restarted", 2, "r"), (KEYED, "cold", 3, "s")]
TURNS += [(None, "warm", 3, "s")]
ALL_BEFORE = "The conversation so far.\n\nUser: words 0\n\nAgent: yes\n\nUser: words 1\n\nUser: words 2\n\n"


def execution(number: int) -> str:
    return f"e{number}000000-0000-4000-8000-000000000000"


def opened(process: int) -> dict[str, Any]:
    """What an agent says that it was started with: the second one under BRIEF, the others under KEYED."""
    if process == 2:
        return {"instructions": "Be brief."}
    value = OLD if process == 1 else NEW
    notes = {"name": "notes", "where": "http://notes", "names": ["X-Key"], "values": {"X-Key": value}}
    return {"model": "large", "values": {"MODEL_KEY": value}, "servers": [notes]}


def put(value: str, at: float) -> Call:
    request = calls.PutCredentialRequest(project=KEY[0], request_id=value, name="key", value=value)
    return replace(made.call(request, calls.PutCredentialResponse()), began_at=at, answered_at=at + 1)


def run() -> ControlRecording:
    """Five turns, the n-th sent at 100 n and handed over 50 later; the value is another one from 250 on."""
    recording = ControlRecording(calls=[put(OLD, 1), put(NEW, 250)], rows={KEY: Rows()}, settled=True)
    log = []
    for number, (spec, how, process, record) in enumerate(TURNS):
        name, words, input_id = execution(number), f"words {number}", f"input {number}"
        sent = made.send(words, words, input_id)
        assert isinstance(sent.request, calls.SendInputRequest)
        if spec is not None:
            sent.request.spec.CopyFrom(spec)
        recording.calls.append(replace(sent, began_at=100.0 * number, answered_at=100.0 * number + 1))
        log += [
            made.started(3 * number, name, number, input_id, agent="scripted"),
            made.says(3 * number + 1, name, input_id, words),
            made.ended(3 * number + 2, "execution.completed", name, number, how=how),
        ]
        log[-1].execution_completed.summary.sandbox_id = f"sandbox {process}"
        log[-1].execution_completed.summary.agent_report_json = json.dumps({"hearth.dev/agent": {"pid": process}})
        context = ALL_BEFORE if number == 3 else ""
        at = 100.0 * number + 50
        recording.turns.append(
            made.asked(name, words, process, record=record, at=at, context=context, **opened(process))
        )
    made.tell(recording, log)
    return recording


def test_a_sound_run_passes() -> None:
    verdict = check(run())
    assert verdict.wrong == []
    assert verdict.checked > 30


def by_another(number: int, **changes: Any) -> Callable[[ControlRecording], None]:
    """The prompt of a turn went to an agent with other properties."""

    def change(recording: ControlRecording) -> None:
        recording.turns[number] = replace(recording.turns[number], **changes)

    return change


def opened_with(number: int, **changes: Any) -> Callable[[ControlRecording], None]:
    """The agent of a turn was opened with something else."""

    def change(recording: ControlRecording) -> None:
        turn = recording.turns[number]
        assert turn.opened is not None
        recording.turns[number] = replace(turn, opened=replace(turn.opened, **changes))

    return change


def ending(number: int, **changes: Any) -> Callable[[ControlRecording], None]:
    """The ending of a turn tells something else."""

    def change(recording: ControlRecording) -> None:
        log = recording.events(KEY)
        summary = log[3 * number + 2].execution_completed.summary
        for name, value in changes.items():
            setattr(summary, name, value)

    return change


def spec_of(number: int, spec: sessions.SessionSpec) -> Callable[[ControlRecording], None]:
    """A message brings another spec than it did."""

    def change(recording: ControlRecording) -> None:
        request = recording.calls[2 + number].request
        assert isinstance(request, calls.SendInputRequest)
        request.spec.CopyFrom(spec)

    return change


def of_a_stranger(recording: ControlRecording) -> None:
    recording.turns.insert(1, made.asked(execution(9), "x", 1, **opened(1)))


def two_in_one(recording: ControlRecording) -> None:
    recording.turns.insert(1, made.asked(execution(9), "x", 9, record="r"))


def never_asked(recording: ControlRecording) -> None:
    """A turn that the second agent never had lies between its turns."""
    del recording.turns[1]
    recording.turns[1] = replace(recording.turns[1], opened=recording.turns[0].opened)


def rotated_early(recording: ControlRecording) -> None:
    """The value that the first agent has was another one before its second turn was sent."""
    recording.calls[1] = put(NEW, 60)


def rotated_late(recording: ControlRecording) -> None:
    """The new value was there only after the last agent had it."""
    recording.calls[1] = put(NEW, 360)


ASKS = sessions.SessionSpec(
    permissions=sessions.PermissionPolicy(default_action=sessions.PERMISSION_ACTION_ASK), model="large"
)


@pytest.mark.parametrize(
    ("breaks", "words"),
    [
        (of_a_stranger, "several sessions"),
        (two_in_one, "record r was asked in several sessions"),
        (by_another(1, opened=None), "never opened"),
        (never_asked, "does not know the turn before it"),
        (spec_of(1, ASKS), "opened for another spec"),
        (ending(1, how="cold"), "is said to be cold"),
        (ending(3, how="warm"), "is said to be warm"),
        (ending(1, agent_report_json='{"hearth.dev/agent": {"pid": 8}}'), "answered by process 8"),
        (ending(1, sandbox_id="sandbox 9"), "in another sandbox"),
        (opened_with(2, instructions="Be long."), "wanted is"),
        (opened_with(0, model=""), "wanted is"),
        (opened_with(0, servers=[]), "MCP servers"),
        (opened_with(3, values={"MODEL_KEY": OLD}), "another value in MODEL_KEY"),
        (opened_with(3, values={}), "another value in MODEL_KEY"),
        (opened_with(3, servers=[{**opened(3)["servers"][0], "values": {"X-Key": OLD}}]), "another value in X-Key"),
        (opened_with(2, values={"MODEL_KEY": OLD}), "another value in MODEL_KEY"),
        (rotated_early, "another value in MODEL_KEY"),
        (rotated_late, "another value in MODEL_KEY"),
        (by_another(2, record="t"), f"does not know {execution(0)}, {execution(1)}"),
        (by_another(3, context=ALL_BEFORE.replace("words 1", "words 5")), "told what nobody said before: ['words 5']"),
        (by_another(3, context=""), "does not know"),
        (by_another(4, text="words 3"), "instead of 'words 4'"),
    ],
    ids=lambda one: "" if callable(one) else str(one),
)
def test_it_sees(breaks: Callable[[ControlRecording], None], words: str) -> None:
    recording = run()
    breaks(recording)
    assert any(words in wrong for wrong in check(recording).wrong), check(recording).wrong


def test_what_nobody_can_know_is_not_held_against_it() -> None:
    # The value was changed while the turn was prepared: it may have had either.
    for at in (320, 345):
        recording = run()
        recording.calls.append(put("value newest", at))
        del recording.turns[4]
        assert check(recording).wrong == []
    # A transcript that was cut, of a conversation that is too long.
    recording = run()
    cut = "[earlier parts of the conversation are left out]\n\nUser: words 2\n\n"
    by_another(3, context=cut)(recording)
    by_another(4, record="s")(recording)
    assert check(recording).wrong == []
    # Nobody was told what became of a message: its spec is known by its words.
    recording = run()
    unanswered = recording.calls[2]
    unanswered.response, unanswered.answered = None, 0
    assert check(recording).wrong == []
    # A turn on its way to a log that was read before.
    recording = run()
    recording.turns.append(made.asked(execution(5), "words 5", 3, record="s", **opened(3)))
    assert check(recording).wrong
    recording.settled = False
    assert check(recording).wrong == []


def test_who_else_was_there_is_of_no_matter() -> None:
    recording = run()
    recording.turns.append(made.asked(execution(9), "x", 9, record="t"))
    recording.turns.append(made.asked(execution(8), "y", 9, record="t"))
    assert check(recording).wrong == []
