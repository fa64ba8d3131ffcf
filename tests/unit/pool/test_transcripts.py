"""The conversation in words: whole where it fits, else its end, and never what it was not."""

from __future__ import annotations

from collections.abc import Sequence

from hearth.types.v1 import content_pb2, event_pb2
from services.pool.warm.transcripts import Transcript


def said(role: content_pb2.Role.ValueType, text: str, finish: str = "end") -> event_pb2.Event:
    content = [content_pb2.ContentPart(text=content_pb2.TextPart(text=text))]
    return event_pb2.Event(
        message_completed=event_pb2.MessageCompleted(role=role, content=content, finish_reason=finish)
    )


USER, AGENT, THOUGHT = content_pb2.ROLE_USER, content_pb2.ROLE_AGENT, content_pb2.ROLE_THOUGHT


def written(events: Sequence[event_pb2.Event], budget: int = 10_000) -> str:
    transcript = Transcript(budget)
    for event in reversed(events):
        if not transcript.add(event):
            break
    return transcript.text()


def test_w_e06_messages_and_tools_in_their_order() -> None:
    tool = event_pb2.Event(
        tool_completed=event_pb2.ToolCompleted(
            name="read", input_json='{"path":"a"}', output="text", status=event_pb2.TOOL_STATUS_SUCCEEDED
        )
    )
    text = written([said(USER, "look"), said(THOUGHT, "hm"), tool, said(AGENT, "it says text")])
    lines = text.split("\n\n")[1:]
    assert lines == ["User: look", 'Tool read with {"path":"a"}: done\ntext', "Agent: it says text"]


def test_what_was_cut_says_so() -> None:
    stopped = event_pb2.Event(execution_stopped=event_pb2.ExecutionStopped(reason="user"))
    text = written([said(USER, "go"), said(AGENT, "I was", "stopped"), stopped])
    assert text.endswith("Agent: I was [cut off]\n\n[the turn was stopped]")


def test_nothing_said_is_no_transcript() -> None:
    assert written([]) == ""
    assert written([event_pb2.Event(execution_started=event_pb2.ExecutionStarted())]) == ""


def test_over_the_budget_the_end_is_kept_and_the_cut_is_told() -> None:
    text = written([said(USER, "old " * 50), said(AGENT, "middle"), said(USER, "new")], budget=60)
    assert "left out" in text
    assert "old" not in text
    assert text.endswith("Agent: middle\n\nUser: new")


def test_long_outputs_are_cut() -> None:
    tool = event_pb2.ToolCompleted(name="run", output="x" * 5000, status=event_pb2.TOOL_STATUS_FAILED)
    text = written([said(USER, "go"), event_pb2.Event(tool_completed=tool)])
    assert len(text) < 3000
    assert text.endswith("[cut]")


def test_w_e06_tool_turns_survive_a_pruned_answer() -> None:
    tool = event_pb2.Event(
        tool_completed=event_pb2.ToolCompleted(
            name="edit", input_json="{}", output="done", status=event_pb2.TOOL_STATUS_SUCCEEDED
        )
    )
    text = written([said(USER, "go"), tool, said(AGENT, ""), said(USER, "and now?")])
    assert text.split("\n\n")[1:] == ["User: go", "Tool edit with {}: done\ndone", "User: and now?"]


def test_a_file_is_named_with_its_place_in_the_workspace() -> None:
    part = content_pb2.AttachmentPart(attachment_id="a1", name="plan.txt")
    message = event_pb2.MessageCompleted(role=USER, content=[content_pb2.ContentPart(attachment=part)])
    text = written([event_pb2.Event(message_completed=message)])
    assert text.endswith("User: [file plan.txt, in the workspace at .hearth/attachments/a1/plan.txt]")
