"""From the updates of a turn to frames and events: whole messages and tool calls, each once, within their bounds."""

from __future__ import annotations

import io
import json
import tracemalloc
from collections.abc import Mapping

import pytest

from hearth.types.v1 import content_pb2, event_pb2, frame_pb2
from services.pool.harness import assembler
from services.pool.harness.assembler import (
    FRAME_TEXT_BYTES,
    LIVE_OUTPUT_BYTES,
    MESSAGE_BYTES,
    OPEN_TOOLS,
    OPEN_TOOLS_CHARACTERS,
    TOOL_OUTPUT_BYTES,
    EventOut,
    FrameOut,
    Output,
    TurnAssembler,
    TurnEnd,
    cut,
    split,
)
from services.pool.harness.port import (
    OtherUpdate,
    PermissionAsked,
    PlanChanged,
    QuestionAsked,
    TextChunk,
    ToolUpdate,
    Update,
    UsageChanged,
)
from services.pool.harness.updates import read_update

SUCCEEDED = event_pb2.TOOL_STATUS_SUCCEEDED
FAILED = event_pb2.TOOL_STATUS_FAILED
DENIED = event_pb2.TOOL_STATUS_DENIED
CANCELLED = event_pb2.TOOL_STATUS_CANCELLED
UNKNOWN = event_pb2.TOOL_STATUS_UNKNOWN


class Turn:
    """An assembler, and all that came out of it."""

    def __init__(self) -> None:
        self.assembler = TurnAssembler("execution", iter(f"m{number}" for number in range(1, 1000)).__next__)
        self.outputs: list[Output] = []

    def take(self, *updates: Update) -> list[str]:
        """What the updates lead to, in short."""
        found: list[Output] = []
        for update in updates:
            found += self.assembler.take(update)
        self.outputs += found
        return [short(output) for output in found]

    def finish(self, end: TurnEnd) -> list[str]:
        events = self.assembler.finish(end)
        self.outputs += map(EventOut, events)
        return [short(EventOut(event)) for event in events]

    @property
    def events(self) -> list[event_pb2.Event]:
        return [output.event for output in self.outputs if isinstance(output, EventOut)]

    @property
    def frames(self) -> list[FrameOut]:
        return [output for output in self.outputs if isinstance(output, FrameOut)]

    def shown(self, entity: str) -> str:
        """What a reader of the frames has assembled."""
        text = ""
        for frame in self.frames:
            if frame.entity_id != entity:
                continue
            if "text_delta" in frame.body:
                text += frame.body["text_delta"].text
            elif "thought_delta" in frame.body:
                text += frame.body["thought_delta"].text
            elif "tool_output" in frame.body:
                text = (
                    frame.body["tool_output"].text
                    if frame.body["tool_output"].replace
                    else (text + frame.body["tool_output"].text)
                )
        return text


def short(output: Output) -> str:
    if isinstance(output, FrameOut):
        [name] = output.body
        return f"{output.entity_id} {name}"
    event = output.event
    if event.WhichOneof("body") == "message_completed":
        body = event.message_completed
        role = "thought" if body.role == content_pb2.ROLE_THOUGHT else "agent"
        return f"{event.entity_id} {role} {body.content[0].text.text!r} {body.finish_reason}"
    tool = event.tool_completed
    return f"{event.entity_id} {tool.name} {event_pb2.ToolStatus.Name(tool.status).removeprefix('TOOL_STATUS_')}"


def say(text: str, message_id: str = "") -> TextChunk:
    return TextChunk(message_id, text)


def think(text: str) -> TextChunk:
    return TextChunk("", text, thought=True)


def call(tool_call_id: str = "c1", **fields: object) -> ToolUpdate:
    return ToolUpdate(tool_call_id, **{"started": True, "title": "run", "input_json": '{"a":1}', **fields})  # type: ignore[arg-type]


def ask(tool_call_id: str = "c1", key: str = "k1") -> PermissionAsked:
    return PermissionAsked(key, tool_call_id, "run", "execute", '{"a":1}', [])


def done(tool_call_id: str = "c1", status: str = "completed", output: str | None = "ok") -> ToolUpdate:
    return ToolUpdate(tool_call_id, status=status, output=output)


def test_deltas_become_one_message() -> None:
    turn = Turn()
    assert turn.take(say("Hel"), say(""), say("lo")) == ["m1 text_delta", "m1 text_delta"]
    assert turn.finish(TurnEnd.END) == ["m1 agent 'Hello' end"]
    event = turn.events[0]
    assert (event.type, event.entity_id, event.message_completed.message_id) == ("message.completed", "m1", "m1")
    assert turn.shown("m1") == "Hello"


def test_a_message_ends_where_another_kind_of_output_begins() -> None:
    turn = Turn()
    assert turn.take(think("hm"), say("a")) == ["m1 thought_delta", "m1 thought 'hm' end", "m2 text_delta"]
    assert turn.take(call()) == ["m2 agent 'a' end", "c1 tool_started"]
    assert turn.take(say("b"), done()) == ["m3 text_delta", "c1 tool_output", "m3 agent 'b' end", "c1 run SUCCEEDED"]
    assert turn.take(say("c"), say("d", "other"), say("e", "another")) == [
        "m4 text_delta",
        "m4 text_delta",
        "m4 text_delta",
    ], "only two ids that differ tell two messages apart"
    assert turn.finish(TurnEnd.END) == ["m4 agent 'cde' end"]


def test_a_message_ends_where_the_agent_says_that_another_begins() -> None:
    turn = Turn()
    assert turn.take(say("a", "1"), say("b", "1"), say("c", "2")) == [
        "m1 text_delta",
        "m1 text_delta",
        "m1 agent 'ab' end",
        "m2 text_delta",
    ]


def test_usage_plans_and_unknown_things_do_not_cut_a_message() -> None:
    turn = Turn()
    usage = UsageChanged(content_pb2.Usage(context_tokens=5))
    found = turn.take(say("a"), usage, PlanChanged([("x", "pending", "low")]), OtherUpdate("mode", "{}"), say("b"))
    assert found == ["m1 text_delta", "execution usage", "execution plan", "m1 text_delta"]
    assert turn.finish(TurnEnd.END) == ["m1 agent 'ab' end"]


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (TurnEnd.END, ["m1 agent 'a' end", "c1 run UNKNOWN"]),
        (TurnEnd.STOPPED, ["m1 agent 'a' stopped", "c1 run CANCELLED"]),
        (TurnEnd.TRUNCATED, ["m1 agent 'a' truncated", "c1 run UNKNOWN"]),
        (TurnEnd.PAUSED, ["m1 agent 'a' end", "c1 run UNKNOWN"]),
    ],
)
def test_the_end_completes_what_is_open(end: TurnEnd, expected: list[str]) -> None:
    turn = Turn()
    turn.take(call(), say("a"))
    assert turn.finish(end) == expected
    assert turn.assembler.running_tools == []


def test_a_tool_call_from_start_to_end() -> None:
    turn = Turn()
    assert turn.take(
        call(status="pending", kind="execute"),
        ToolUpdate("c1", status="in_progress", title="run it", input_json='{"a":2}'),
        ToolUpdate("c1", output="line 1\n"),
        ToolUpdate("c1", output="line 1\nline 2\n"),
        ToolUpdate("c1", output="line 1\nline 2\n"),
        done(output="all new"),
        done(output="an afterthought"),
    ) == ["c1 tool_started", "c1 tool_delta", *["c1 tool_output"] * 3, "c1 run it SUCCEEDED"]
    tool = turn.events[0].tool_completed
    assert (tool.input_json, tool.output, tool.kind, tool.error) == ('{"a":2}', "all new", "execute", "")
    outputs = [frame.body["tool_output"] for frame in turn.frames if "tool_output" in frame.body]
    assert [(output.text, output.replace) for output in outputs] == [
        ("line 1\n", False),
        ("line 2\n", False),
        ("all new", True),
    ]
    assert turn.shown("c1") == "all new"


def test_a_tool_call_that_begins_in_the_middle_has_a_name_and_an_input() -> None:
    turn = Turn()
    turn.take(ToolUpdate("c1", status="completed"))
    tool = turn.events[0].tool_completed
    assert (tool.name, tool.input_json, tool.status) == ("tool", "{}", SUCCEEDED)


def test_output_grows_by_what_is_added_to_it() -> None:
    turn = Turn()
    added = [ToolUpdate("c1", status="in_progress", more_output=more) for more in ("one\n", "two\n", "")]
    assert turn.take(call(), *added)[1:] == ["c1 tool_delta", "c1 tool_output", "c1 tool_output"]
    assert turn.shown("c1") == "one\ntwo\n"
    turn.take(ToolUpdate("c1", status="failed", more_output="three"))
    completed = turn.events[-1].tool_completed
    assert (completed.output, completed.error) == ("one\ntwo\nthree", "one\ntwo\nthree")


def test_failures_say_what_the_agent_said() -> None:
    turn = Turn()
    turn.take(call("a"), call("b"), done("a", "failed", "no such file"), done("b", "failed", None))
    assert [(event.tool_completed.output, event.tool_completed.error) for event in turn.events] == [
        ("no such file", "no such file"),
        ("", "failed"),
    ]


def test_tool_calls_side_by_side() -> None:
    turn = Turn()
    turn.take(call("a"), call("b", title="other"))
    assert turn.assembler.running_tools == ["a", "b"]
    assert turn.take(done("b"), done("a")) == [
        "b tool_output",
        "b other SUCCEEDED",
        "a tool_output",
        "a run SUCCEEDED",
    ]


def test_an_id_that_comes_again_is_another_call() -> None:
    turn = Turn()
    turn.take(call(), done(), call(title="again"), done())
    turn.take(ask(), call(title="third"), done())
    assert [event.entity_id for event in turn.events] == ["c1", "c1#2", "c1#3"]
    assert turn.assembler.entity_of("c1") == "c1#3"
    assert turn.assembler.entity_of("unknown") == "unknown"


@pytest.mark.parametrize("tool_call_id", ["", "x" * 300])
def test_ids_that_cannot_be_entities_are_replaced(tool_call_id: str) -> None:
    turn = Turn()
    turn.take(call(tool_call_id))
    assert turn.assembler.entity_of(tool_call_id) == "m1"
    turn.take(done(tool_call_id))
    assert [event.entity_id for event in turn.events] == ["m1"]


# Permissions


def test_what_was_said_before_a_question_is_complete_before_it() -> None:
    turn = Turn()
    assert turn.take(say("May I?"), ask()) == ["m1 text_delta", "m1 agent 'May I?' end", "c1 tool_started"]
    assert turn.take(say("Well?"), QuestionAsked("k", "", False, "?", "{}", "")) == [
        "m2 text_delta",
        "m2 agent 'Well?' end",
    ]


def test_a_denied_call_is_denied_whatever_the_agent_calls_it() -> None:
    turn = Turn()
    turn.take(call(), ask())
    turn.assembler.decided("c1", allowed=False)
    assert turn.take(done(status="failed", output="refused"))[-1] == "c1 run DENIED"


def test_a_denied_call_that_the_agent_never_mentions_again_is_written_from_the_question() -> None:
    turn = Turn()
    turn.take(ask())
    turn.assembler.decided("c1", allowed=False)
    assert turn.finish(TurnEnd.END) == ["c1 run DENIED"]
    tool = turn.events[0].tool_completed
    assert (tool.name, tool.kind, tool.input_json) == ("run", "execute", '{"a":1}')


def test_a_call_asked_about_before_it_appears_is_one_call() -> None:
    turn = Turn()
    turn.take(ask())
    turn.assembler.decided("c1", allowed=True)
    assert turn.take(call(), done()) == ["c1 tool_output", "c1 run SUCCEEDED"]


def test_a_call_asked_about_twice() -> None:
    turn = Turn()
    turn.take(call(), ask(key="k1"))
    turn.assembler.decided("c1", allowed=False)
    turn.take(ask(key="k2"))
    turn.assembler.decided("c1", allowed=True)
    assert turn.take(done())[-1] == "c1 run SUCCEEDED"


@pytest.mark.parametrize(
    ("end", "expected"),
    [
        (TurnEnd.PAUSED, []),
        (TurnEnd.STOPPED, ["c1 run CANCELLED"]),
        (TurnEnd.END, ["c1 run CANCELLED"]),
        (TurnEnd.TRUNCATED, ["c1 run CANCELLED"]),
    ],
)
def test_a_call_that_nobody_decided_about_did_not_run(end: TurnEnd, expected: list[str]) -> None:
    turn = Turn()
    turn.take(call(), ask())
    assert turn.finish(end) == expected


# What counts as output, and usage


def test_an_empty_turn_is_seen() -> None:
    turn = Turn()
    turn.take(UsageChanged(content_pb2.Usage()), PlanChanged([]), OtherUpdate("mode", "{}"), say(""))
    assert not turn.assembler.produced_anything
    assert turn.finish(TurnEnd.END) == []


@pytest.mark.parametrize("update", [say("x"), think("x"), call(), ask(), QuestionAsked("k", "", False, "?", "{}", "")])
def test_a_turn_with_anything_in_it_is_not_empty(update: Update) -> None:
    turn = Turn()
    turn.take(update)
    assert turn.assembler.produced_anything


def test_usage_is_gathered_from_all_reports() -> None:
    turn = Turn()
    turn.take(UsageChanged(content_pb2.Usage(context_tokens=5, context_window_tokens=100)))
    turn.take(UsageChanged(content_pb2.Usage(context_tokens=9)))
    turn.assembler.finish(TurnEnd.END, content_pb2.Usage(input_tokens=3, output_tokens=4))
    assert turn.assembler.usage == content_pb2.Usage(
        context_tokens=9, context_window_tokens=100, input_tokens=3, output_tokens=4
    )


# Bounds


def test_a_long_delta_is_cut_into_frames() -> None:
    turn = Turn()
    text = "é" * 100_000
    turn.take(say(text))
    assert all(len(frame.body["text_delta"].text.encode()) <= FRAME_TEXT_BYTES for frame in turn.frames)
    assert turn.shown("m1") == text


def test_a_long_message_becomes_several() -> None:
    turn = Turn()
    for _ in range(20):
        turn.take(say("x" * 100_000))
    turn.finish(TurnEnd.STOPPED)
    sizes = [len(event.message_completed.content[0].text.text) for event in turn.events]
    assert sum(sizes) == 2_000_000
    assert max(sizes) <= MESSAGE_BYTES
    assert [event.message_completed.finish_reason for event in turn.events] == ["end", "end", "stopped"]
    assert all(turn.shown(event.entity_id) == text_of(event) for event in turn.events)


def text_of(event: event_pb2.Event) -> str:
    return event.message_completed.content[0].text.text


def test_long_output_is_shown_as_far_as_reasonable_and_cut_in_the_event() -> None:
    turn = Turn()
    output = "x" * 3_000_000
    turn.take(call(), done(output=output))
    live = sum(len(frame.body["tool_output"].text) for frame in turn.frames if "tool_output" in frame.body)
    assert live <= LIVE_OUTPUT_BYTES
    tool = turn.events[0].tool_completed
    assert (len(tool.output), tool.output_truncated) == (TOOL_OUTPUT_BYTES, True)


class Counted(io.StringIO):
    """Counts the characters that go in and out."""

    characters = 0

    def write(self, text: str, /) -> int:
        Counted.characters += len(text)
        return super().write(text)

    def getvalue(self) -> str:
        Counted.characters += len(text := super().getvalue())
        return text


def test_output_without_end_is_kept_and_copied_no_further_than_it_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assembler.io, "StringIO", Counted)  # type: ignore[attr-defined]
    monkeypatch.setattr(Counted, "characters", 0)
    turn = Turn()
    turn.take(call())
    tracemalloc.start()
    try:
        for number in range(20_000):
            turn.take(ToolUpdate("c1", more_output=f"{number:07} " * 1024))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 * LIVE_OUTPUT_BYTES
    assert Counted.characters <= LIVE_OUTPUT_BYTES
    shown = turn.shown("c1")
    assert len(shown) == LIVE_OUTPUT_BYTES
    turn.take(done(output=None))
    assert Counted.characters <= 2 * LIVE_OUTPUT_BYTES
    tool = turn.events[0].tool_completed
    assert (len(tool.output), tool.output_truncated) == (TOOL_OUTPUT_BYTES, True)
    assert shown.startswith(tool.output)


def test_output_that_is_told_anew_each_time_is_shown_by_what_it_grew() -> None:
    turn = Turn()
    turn.take(call())
    step = "0123456789abcde\n" * (LIVE_OUTPUT_BYTES // 16 // 16)
    for times in range(1, 40):
        turn.take(ToolUpdate("c1", output=step * times))
        assert turn.shown("c1") == step * min(times, 16)
    turn.take(done(output=step * 40))
    tool = turn.events[0].tool_completed
    assert (tool.output, tool.output_truncated) == (step * 8, True)


def test_what_fits_into_the_event_to_the_last_character_is_not_truncated() -> None:
    for character, size in (("x", TOOL_OUTPUT_BYTES), ("é", TOOL_OUTPUT_BYTES // 2), ("€", TOOL_OUTPUT_BYTES // 3)):
        for more, truncated in (("", False), ("xyz", True)):
            turn = Turn()
            turn.take(call(), ToolUpdate("c1", more_output=character * size), ToolUpdate("c1", more_output=more))
            turn.take(done(output=None))
            tool = turn.events[0].tool_completed
            assert tool.output_truncated is truncated
            assert tool.output.startswith(character * size)
            assert len(tool.output.encode()) <= TOOL_OUTPUT_BYTES


@pytest.mark.parametrize("room", [1, 2, 3])
def test_nothing_is_kept_after_a_character_that_did_not_fit(room: int) -> None:
    turn = Turn()
    turn.take(call(), ToolUpdate("c1", more_output="x" * (LIVE_OUTPUT_BYTES - room)))
    turn.take(ToolUpdate("c1", more_output="\U0001f600"), ToolUpdate("c1", more_output="y"))
    assert turn.shown("c1") == "x" * (LIVE_OUTPUT_BYTES - room)


def test_calls_of_whose_end_nothing_is_told_are_ended_by_those_that_come() -> None:
    turn = Turn()
    turn.take(call("asked"), ask("asked"), *(call(f"c{number}") for number in range(OPEN_TOOLS - 1)))
    assert turn.events == []
    assert turn.take(call("another")) == ["another tool_started", "c0 run UNKNOWN"]
    assert turn.take(done("c0")) == []
    assert len(turn.assembler.running_tools) == OPEN_TOOLS - 1
    assert turn.finish(TurnEnd.END)[0] == "asked run CANCELLED"


def test_what_is_kept_of_calls_that_run_has_a_bound() -> None:
    turn = Turn()
    for number in range(8):
        turn.take(call(f"c{number}", input_json=json.dumps("x" * (OPEN_TOOLS_CHARACTERS // 4))))
    assert turn.assembler.running_tools == ["c5", "c6", "c7"]


def test_input_too_long_for_an_event_says_so_in_its_own_language() -> None:
    turn = Turn()
    turn.take(call(input_json=json.dumps({"text": "x" * 2_000_000})), done())
    [frame] = [frame for frame in turn.frames if "tool_started" in frame.body]
    assert frame.body["tool_started"].input_json == ""
    event = turn.events[0]
    assert list(json.loads(event.tool_completed.input_json)) == ["hearth.dev/truncated"]
    assert event.ByteSize() < 1024 * 1024


def test_a_huge_plan_still_is_a_frame() -> None:
    turn = Turn()
    turn.take(PlanChanged([("x" * 10_000, "pending", "low")] * 1_000))
    assert len(turn.frames[0].body["plan"].steps) > 1
    assert frame_pb2.Frame(plan=turn.frames[0].body["plan"]).ByteSize() < 64 * 1024


def test_a_character_cut_in_two_is_put_together() -> None:
    turn = Turn()
    assert turn.take(say("a\ud83d"), say("\ude00b")) == ["m1 text_delta", "m1 text_delta"]
    assert turn.finish(TurnEnd.END) == ["m1 agent 'a\U0001f600b' end"]
    assert turn.shown("m1") == "a\U0001f600b"


@pytest.mark.parametrize("end", TurnEnd)
def test_l1_half_a_character_at_the_end_is_in_no_message_as_it_was_in_no_frame(end: TurnEnd) -> None:
    turn = Turn()
    turn.take(say("Hi \ud83d"))
    assert len(turn.finish(end)) == 1
    (event,) = turn.events
    assert event.message_completed.content[0].text.text == turn.shown("m1") == "Hi "
    alone = Turn()
    alone.take(say("\ud83d"))
    assert alone.finish(end) == []


def test_calls_run_for_which_an_end_is_to_come() -> None:
    """Some agents ask under an id of which they never tell anything."""
    turn = Turn()
    turn.take(ask("dialog"), call("told"), ask("told"))
    assert (turn.assembler.running_tools, turn.assembler.allowed_tools) == ([], [])
    turn.assembler.decided("dialog", allowed=False)
    turn.assembler.decided("told", allowed=True)
    assert (turn.assembler.running_tools, turn.assembler.allowed_tools) == (["told"], ["told"])
    turn.take(ask("another"))
    turn.assembler.decided("another", allowed=True)
    turn.take(call("beside"))
    assert turn.assembler.running_tools == ["told", "beside"]
    assert turn.assembler.allowed_tools == ["told", "another"]


def test_raw_output_takes_the_place_of_no_better_words() -> None:
    """A call that shows its edit, and then says in words that it was done."""

    def output_of(*updates: Mapping[str, object]) -> str:
        turn = Turn()
        for update in updates:
            found = read_update({"toolCallId": "c", "sessionUpdate": "tool_call_update", **update})
            assert found is not None
            turn.take(found)
        return turn.events[0].tool_completed.output

    edit = {"content": [{"type": "content", "content": {"type": "text", "text": "-a\n+b"}}]}
    assert output_of(edit, {"status": "completed", "rawOutput": "updated"}) == "-a\n+b"
    assert output_of(edit, {"status": "failed", "rawOutput": "no such file"}) == "no such file"
    assert output_of({"rawOutput": "1"}, {"rawOutput": "1 2"}, {"status": "completed"}) == "1 2"
    assert output_of({"rawOutput": "1"}, {"status": "completed", **edit}) == "-a\n+b"
    assert (
        output_of({"rawOutput": "1"}, {"status": "in_progress"}, {"status": "completed", "rawOutput": "1 2"}) == "1 2"
    )
    assert output_of({"rawOutput": "1"}, edit, {"status": "completed", "rawOutput": "updated"}) == "-a\n+b"


@pytest.mark.parametrize("text", ["", "abc", "é" * 10, "a€b" * 5, "\U0001f600" * 4])
@pytest.mark.parametrize("size", [4, 5, 7, 100])
def test_pieces_are_whole_characters_and_together_the_text(text: str, size: int) -> None:
    pieces = split(text, size)
    assert "".join(pieces) == text
    assert all(0 < len(piece.encode()) <= size for piece in pieces)
    assert text.startswith(cut(text, size))
    assert len(cut(text, size).encode()) <= size


def test_a_cut_takes_as_many_whole_characters_as_fit() -> None:
    assert [cut("a€b", size) for size in range(6)] == ["", "a", "a", "a", "a€", "a€b"]


def test_a_tool_of_the_client_is_a_call_with_its_result() -> None:
    turn = Turn()
    asked = QuestionAsked("k", "call-1", client_tool=True, prompt="map", input_json='{"a":1}', schema_json="")
    turn.take(asked)
    outputs = turn.assembler.answered("call-1", '{"at":[1,2]}')
    (event,) = [output.event for output in outputs if isinstance(output, EventOut)]
    assert (event.tool_completed.name, event.tool_completed.input_json) == ("map", '{"a":1}')
    assert (event.tool_completed.output, event.tool_completed.status) == ('{"at":[1,2]}', SUCCEEDED)
    assert turn.finish(TurnEnd.END) == []
    assert turn.assembler.answered("call-1", "again") == []


def test_a_tool_of_the_client_that_nobody_runs_is_cancelled() -> None:
    turn = Turn()
    turn.take(QuestionAsked("k", "call-1", client_tool=True, prompt="map", input_json="{}", schema_json=""))
    (event,) = [output.event for output in turn.assembler.answered("call-1", None) if isinstance(output, EventOut)]
    assert event.tool_completed.status == CANCELLED


def test_a_tool_of_the_client_that_the_agent_tells_of_is_the_agents() -> None:
    turn = Turn()
    turn.take(ToolUpdate("call-1", started=True, title="map"))
    turn.take(QuestionAsked("k", "call-1", client_tool=True, prompt="map", input_json="{}", schema_json=""))
    assert turn.assembler.answered("call-1", "1") == []
    assert turn.assembler.running_tools == ["call-1"]


def test_a_paused_turn_leaves_open_what_waits_for_people_and_nothing_else() -> None:
    turn = Turn()
    for number in (1, 2, 3):
        turn.take(ToolUpdate(f"call-{number}", started=True, title="t"))
    turn.take(PermissionAsked("k1", "call-1", "t", "", "{}", ()), PermissionAsked("k2", "call-2", "t", "", "{}", ()))
    turn.take(QuestionAsked("k3", "call-4", client_tool=True, prompt="map", input_json="{}", schema_json=""))
    turn.assembler.decided("call-2", allowed=True)
    events = turn.assembler.finish(TurnEnd.PAUSED)
    assert [(e.entity_id, e.tool_completed.status) for e in events] == [("call-2", UNKNOWN), ("call-3", UNKNOWN)]


def test_a_call_waits_for_people_though_the_agent_says_that_it_is_in_progress() -> None:
    turn = Turn()
    turn.take(call(), ask(), ToolUpdate("c1", status="in_progress"))
    assert turn.finish(TurnEnd.PAUSED) == []


def test_a_request_that_is_silent_about_its_call_is_about_what_was_said_of_it() -> None:
    turn = Turn()
    turn.take(ToolUpdate("call-1", started=True, title="write", kind="edit", input_json='{"path":"a"}'))
    silent = PermissionAsked("k", "call-1", "", "", "{}", ())
    about = turn.assembler.about(silent)
    assert (about.title, about.kind, about.input_json) == ("write", "edit", '{"path":"a"}')
    full = PermissionAsked("k", "call-1", "Write a", "other", '{"path":"b"}', ())
    assert turn.assembler.about(full) == full
    unknown = PermissionAsked("k", "call-7", "", "", "{}", ())
    assert turn.assembler.about(unknown) == unknown
