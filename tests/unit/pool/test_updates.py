"""Reading what agents say in ACP: every kind of update, and nothing that an agent may send breaks the reader."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.types.v1 import content_pb2, event_pb2
from services.pool.harness.acp import choose
from services.pool.harness.assembler import EventOut, FrameOut, TurnAssembler, TurnEnd
from services.pool.harness.port import (
    Answer,
    OtherUpdate,
    PermissionAsked,
    PermissionOption,
    PlanChanged,
    QuestionAsked,
    TextChunk,
    ToolUpdate,
    UsageChanged,
)
from services.pool.harness.rpc import request_key
from services.pool.harness.updates import (
    attachment_path,
    clean,
    prompt_blocks,
    read_permission,
    read_question,
    read_result,
    read_update,
    set_apart,
)


def text(value: str) -> dict[str, object]:
    return {"type": "text", "text": value}


def test_text_and_thoughts() -> None:
    update = {"sessionUpdate": "agent_message_chunk", "content": text("hi"), "messageId": "m"}
    assert read_update(update) == TextChunk("m", "hi")
    update = {"sessionUpdate": "agent_thought_chunk", "content": text("hm")}
    assert read_update(update) == TextChunk("", "hm", thought=True)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"type": "resource_link", "uri": "file:///a", "name": "a.txt"}, "[a.txt](file:///a)"),
        ({"type": "resource", "resource": {"uri": "file:///a", "text": "inside"}}, "inside"),
    ],
)
def test_links_and_resources_are_text(content: dict[str, object], expected: str) -> None:
    assert read_update({"sessionUpdate": "agent_message_chunk", "content": content}) == TextChunk("", expected)


def test_what_has_no_word_is_kept_as_it_is() -> None:
    image = {"type": "image", "data": "AA==", "mimeType": "image/png"}
    found = read_update({"sessionUpdate": "agent_message_chunk", "content": image})
    assert found == OtherUpdate("agent_message_chunk/image", json.dumps(image, separators=(",", ":")))
    commands = {"sessionUpdate": "available_commands_update", "availableCommands": []}
    found = read_update(commands)
    assert isinstance(found, OtherUpdate)
    assert (found.type, json.loads(found.data)) == ("available_commands_update", commands)


@pytest.mark.parametrize("update", [None, [], "x", {}, {"sessionUpdate": 5}, {"sessionUpdate": "user_message_chunk"}])
def test_what_says_nothing_is_nothing(update: object) -> None:
    assert read_update(update) is None


def test_tool_calls() -> None:
    call = {
        "sessionUpdate": "tool_call",
        "toolCallId": "c1",
        "title": "Read a.txt",
        "kind": "read",
        "status": "pending",
        "rawInput": {"path": "a.txt", "né": 1},
    }
    assert read_update(call) == ToolUpdate(
        "c1", started=True, title="Read a.txt", kind="read", status="pending", input_json='{"path":"a.txt","né":1}'
    )
    update = {
        "sessionUpdate": "tool_call_update",
        "toolCallId": "c1",
        "status": "completed",
        "content": [
            {"type": "content", "content": text("one")},
            {"type": "terminal", "terminalId": "t1"},
            {"type": "content", "content": {"type": "image", "data": ""}},
            "nonsense",
        ],
        "rawOutput": {"ignored": True},
    }
    assert read_update(update) == ToolUpdate(
        "c1", status="completed", output="one\n[terminal t1]\n[image]", raw_output='{"ignored":true}'
    )


def test_output_that_comes_beside_the_content() -> None:
    """As agents tell it that leave the drawing of a terminal to their client."""
    call = {
        "sessionUpdate": "tool_call",
        "toolCallId": "c1",
        "title": "make",
        "content": [{"type": "terminal", "terminalId": "c1"}],
        "_meta": {"terminal_info": {"terminal_id": "c1", "cwd": "/work"}},
    }
    assert read_update(call) == ToolUpdate("c1", started=True, title="make")
    update = {"sessionUpdate": "tool_call_update", "toolCallId": "c1", "status": "in_progress"}
    meta = {"terminal_output": {"terminal_id": "c1", "data": "one\n"}}
    assert read_update({**update, "_meta": meta}) == ToolUpdate("c1", status="in_progress", more_output="one\n")
    silent: list[object] = [{"terminal_output": "x"}, {"terminal_output": {"data": 5}}, {"terminal_exit": {}}, []]
    for meta_of_silent in silent:
        assert read_update({**update, "_meta": meta_of_silent}) == ToolUpdate("c1", status="in_progress")


def test_an_edit_is_shown_as_a_difference() -> None:
    part = {"type": "diff", "path": "a.py", "oldText": "x = 1\n", "newText": "x = 2\n"}
    found = read_update({"sessionUpdate": "tool_call_update", "toolCallId": "c", "content": [part]})
    assert isinstance(found, ToolUpdate)
    assert found.output is not None
    assert found.output.splitlines()[-2:] == ["-x = 1", "+x = 2"]
    large = {"type": "diff", "path": "a.py", "oldText": None, "newText": "x" * 100_000}
    found = read_update({"sessionUpdate": "tool_call_update", "toolCallId": "c", "content": [large]})
    assert isinstance(found, ToolUpdate)
    assert found.output == "a.py: 0 characters replaced by 100000"


@pytest.mark.parametrize(
    ("raw", "expected"),
    [("plain", "plain"), ({"output": "inside", "exitCode": 0}, "inside"), ({"a": 1}, '{"a":1}'), (None, None)],
)
def test_raw_output_stands_in_for_content(raw: object, expected: str | None) -> None:
    found = read_update({"sessionUpdate": "tool_call_update", "toolCallId": "c", "content": [], "rawOutput": raw})
    assert isinstance(found, ToolUpdate)
    assert (found.output, found.raw_output) == (None, expected)


def test_plans_and_usage() -> None:
    entries = [{"content": "think", "status": "pending", "priority": "high"}, "nonsense"]
    assert read_update({"sessionUpdate": "plan", "entries": entries}) == PlanChanged([("think", "pending", "high")])
    update = {"sessionUpdate": "usage_update", "used": 5, "size": 10, "cost": {"amount": 0.25, "currency": "USD"}}
    usage = content_pb2.Usage(context_tokens=5, context_window_tokens=10, cost_micro_usd=250_000)
    assert read_update(update) == UsageChanged(usage)
    odd = {"sessionUpdate": "usage_update", "used": -5, "size": True, "cost": {"amount": 1, "currency": "EUR"}}
    assert read_update(odd) == UsageChanged(content_pb2.Usage())


def test_permissions() -> None:
    params = {
        "toolCall": {"toolCallId": "c1", "title": "rm", "kind": "execute", "rawInput": {"b": 1, "a": 2}},
        "options": [{"optionId": "x", "name": "Yes", "kind": "allow_once"}, {"name": "broken"}, 7],
    }
    asked = read_permission("k", params)
    assert asked is not None
    assert (asked.request_key, asked.tool_call_id, asked.title, asked.kind) == ("k", "c1", "rm", "execute")
    assert asked.input_json == '{"b":1,"a":2}', "exactly what the agent would run"
    assert asked.options == [PermissionOption("x", "Yes", "allow_once")]
    assert read_permission("k", {"options": []}) is None
    assert read_permission("k", None) is None


def test_a_dialog_about_a_call_asks_about_that_call() -> None:
    call: dict[str, object] = {"toolCallId": "c1", "title": "bash", "kind": "execute", "rawInput": {"command": "ls"}}
    text = json.dumps({"hearth.dev/tool_call": call})
    options = [{"optionId": "yes", "name": "Yes", "kind": "allow_once"}]

    def read(raw: object, number: str = "pi-ui-7") -> PermissionAsked | None:
        dialog = {"toolCallId": number, "title": "bash", "kind": "other", "rawInput": raw}
        return read_permission("k", {"toolCall": dialog, "options": options})

    asked = read({"method": "confirm", "title": "bash", "message": text})
    option = PermissionOption("yes", "Yes", "allow_once")
    assert asked == PermissionAsked("k", "c1", "bash", "execute", '{"command":"ls"}', [option])
    for message in ("Sure?", text[:-1], '"hearth.dev/tool_call"', '{"hearth.dev/tool_call":7}', 7, None):
        other = read({"method": "confirm", "message": message})
        assert other is not None
        assert (other.tool_call_id, other.kind) == ("pi-ui-7", "other")
    spoofed = read({"method": "confirm", "title": "bash", "message": text}, "toolu_7")
    assert spoofed is not None
    assert (spoofed.tool_call_id, spoofed.kind) == ("toolu_7", "other"), "arguments say nothing of another call"


def test_ids_are_short_and_the_same_wherever_they_are_named() -> None:
    long, other = "x" * 1_000_000, "x" * 999_999 + "y"
    call = read_update({"sessionUpdate": "tool_call", "toolCallId": long})
    asked = read_permission("k", {"toolCall": {"toolCallId": long}})
    assert isinstance(call, ToolUpdate)
    assert asked is not None
    question = read_question("k", "_hearth/client_tool", {"toolCallId": long})
    assert call.tool_call_id == asked.tool_call_id == question.tool_call_id
    assert len(call.tool_call_id) == 64
    assert read_question("k", "_hearth/client_tool", {"toolCallId": other}).tool_call_id != call.tool_call_id
    assert len(request_key(long)) == 64
    assert (request_key(1), request_key("1"), request_key("x" * 200)) == ("1", '"1"', f'"{"x" * 200}"')


def test_questions() -> None:
    ask = read_question("k", "_hearth/ask", {"prompt": "Which?", "schema": {"type": "string"}})
    assert ask == QuestionAsked("k", "", False, "Which?", "{}", '{"type":"string"}')
    tool = read_question("k", "_hearth/client_tool", {"name": "map", "input": {"a": 1}, "toolCallId": "c"})
    assert tool == QuestionAsked("k", "c", True, "map", '{"a":1}', "")
    assert read_question("k", "_hearth/ask", None).prompt == ""


def test_the_end_of_a_turn() -> None:
    result = {
        "stopReason": "end_turn",
        "usage": {"inputTokens": 3, "outputTokens": 4, "cachedReadTokens": 2},
        "_meta": {"hearth.dev/agent": {"pid": 1}},
    }
    found = read_result(result)
    assert found is not None
    assert found.stop_reason == "end_turn"
    assert found.usage == content_pb2.Usage(input_tokens=3, output_tokens=4, cached_tokens=2)
    assert json.loads(found.report_json) == {"hearth.dev/agent": {"pid": 1}}
    bare = read_result({"stopReason": "refusal", "_meta": {}})
    assert bare is not None
    assert (bare.usage, bare.report_json) == (None, "")
    assert read_result({"stopReason": None}) is None
    assert read_result([]) is None


def test_prompts() -> None:
    attachment = content_pb2.AttachmentPart(attachment_id="id", name="../x.png", media_type="image/png", size_bytes=9)
    parts = [
        content_pb2.ContentPart(text=content_pb2.TextPart(text="hi")),
        content_pb2.ContentPart(resource_link=content_pb2.ResourceLinkPart(uri="https://a/b", media_type="text/html")),
        content_pb2.ContentPart(attachment=attachment),
        content_pb2.ContentPart(inline_media=content_pb2.InlineMediaPart(media_type="audio/wav", data=b"\0\1")),
        content_pb2.ContentPart(),
        content_pb2.ContentPart(
            inline_media=content_pb2.InlineMediaPart(media_type="text/markdown", data="# é".encode())
        ),
    ]
    uri = "file:///workspace/.hearth/attachments/id/x.png"
    everything = {"image": True, "audio": True, "embeddedContext": True}
    assert prompt_blocks(parts, "/workspace", everything) == [
        {"type": "text", "text": "hi"},
        {"type": "resource_link", "uri": "https://a/b", "name": "https://a/b", "mimeType": "text/html"},
        {"type": "resource_link", "uri": uri, "name": "../x.png", "mimeType": "image/png", "size": 9},
        {"type": "audio", "mimeType": "audio/wav", "data": "AAE="},
        {"type": "resource", "resource": {"uri": "hearth:context", "mimeType": "text/markdown", "text": "# é"}},
    ]
    assert prompt_blocks(parts[3:], "/workspace", {"image": True}) == [
        {"type": "text", "text": "[audio/wav, 2 bytes, which this agent cannot take]"},
        {"type": "text", "text": "# é\n\n"},
    ]
    assert attachment_path(attachment, "/workspace") == "/workspace/.hearth/attachments/id/x.png"


def test_what_stands_before_a_message_ends_in_one_blank_line() -> None:
    assert [set_apart(text) for text in ("a", "a\n", "a\n\n", "a\n\nb\n\n\n")] == ["a\n\n"] * 3 + ["a\n\nb\n\n"]


def test_text_that_no_reader_could_take_is_mended() -> None:
    assert clean("a\0b\ud800c") == "a\ufffdb\ufffdc"
    assert clean("\ud83d\ude00") == "\U0001f600"
    assert clean("plain é") == "plain é"


OPTIONS = {
    kind: PermissionOption(f"id-{kind}", kind, kind)
    for kind in ("allow_once", "allow_always", "reject_once", "reject_always")
}


@pytest.mark.parametrize(
    ("kinds", "answer", "chosen"),
    [
        (["allow_always", "allow_once", "reject_once"], Answer.ALLOW, "allow_once"),
        (["allow_always", "allow_once", "reject_once"], Answer.DENY, "reject_once"),
        (["reject_always", "reject_once"], Answer.DENY, "reject_once"),
        (["allow_always", "reject_always"], Answer.ALLOW, "allow_always"),
        (["allow_always", "reject_always"], Answer.DENY, "reject_always"),
        (["allow_once"], Answer.DENY, None),
        (["reject_once"], Answer.ALLOW, None),
        (["allow_once", "reject_once"], Answer.CANCELLED, None),
        ([], Answer.ALLOW, None),
    ],
)
def test_options_are_chosen_by_kind_and_for_once(kinds: list[str], answer: Answer, chosen: str | None) -> None:
    outcome = choose([OPTIONS[kind] for kind in kinds], answer)
    expected = {"outcome": "selected", "optionId": f"id-{chosen}"} if chosen else {"outcome": "cancelled"}
    assert outcome == expected


def test_of_several_options_of_a_kind_the_first_is_chosen() -> None:
    options = [PermissionOption("a", "This time", "allow_once"), PermissionOption("b", "Me too", "allow_once")]
    assert choose(options, Answer.ALLOW)["optionId"] == "a"


# Whatever an agent sends

TOOL_KEYS = ["toolCallId", "title", "kind", "status", "rawInput", "rawOutput", "path", "oldText", "newText"]
OTHER_KEYS = [
    "_meta",
    "terminal_info",
    "terminal_output",
    "data",
    "sessionUpdate",
    "content",
    "type",
    "text",
    "uri",
    "resource",
    "messageId",
    "entries",
    "used",
    "cost",
]
KEYS = st.sampled_from([*TOOL_KEYS, *OTHER_KEYS, "size", "amount", "currency"])
KINDS = ["agent_message_chunk", "agent_thought_chunk", "tool_call", "tool_call_update", "plan", "usage_update"]
TYPES = ["text", "content", "diff", "terminal", "completed", "failed", "in_progress", "USD", "c1"]
WORDS = st.sampled_from([*KINDS, *TYPES, "\ud83d", "\ude00", "\0"])
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | WORDS
VALUES: st.SearchStrategy[Any] = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=6), max_leaves=20
)
UPDATES = st.fixed_dictionaries({"sessionUpdate": WORDS}, optional={"toolCallId": WORDS, "status": WORDS}) | VALUES


@given(st.lists(st.tuples(UPDATES, VALUES), max_size=8), st.sampled_from(TurnEnd))
def test_no_update_breaks_a_turn(values: list[tuple[Any, Any]], end: TurnEnd) -> None:
    """Everything that can be read can be written: each frame and event serializes and keeps to its bounds."""
    assembler = TurnAssembler("x", iter(f"m{number}" for number in range(1000)).__next__)
    events: list[event_pb2.Event] = []
    for value, content in values:
        update = read_update({"content": content, **value} if isinstance(value, dict) else value)
        for output in assembler.take(update) if update is not None else ():
            if isinstance(output, EventOut):
                events.append(output.event)
            elif isinstance(output, FrameOut):
                assert sum(body.ByteSize() for body in output.body.values()) < 64 * 1024  # type: ignore[attr-defined]
    events += assembler.finish(end)
    for event in events:
        assert 0 < len(event.SerializeToString()) < 1024 * 1024
        if event.WhichOneof("body") == "tool_completed":
            assert event.tool_completed.name
            json.loads(event.tool_completed.input_json)
    assert len({event.entity_id for event in events}) == len(events), "no entity is completed twice"
