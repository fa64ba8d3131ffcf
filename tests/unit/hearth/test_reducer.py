"""What a person sees is the same with and without frames, and broken previews never survive their message."""

from __future__ import annotations

import pytest

from hearth.reducer import Entry, Transcript, ending_summary, is_ending, text_of
from hearth.relay.v1 import relay_pb2
from hearth.types.v1 import content_pb2, event_pb2, frame_pb2


def event(event_type: str, execution: str = "e1", **body: object) -> relay_pb2.Item:
    inner = event_pb2.Event(type=event_type, execution_id=execution, **body)  # type: ignore[arg-type]
    return relay_pb2.Item(event=event_pb2.EventItem(event=inner))


def said(message_id: str, text: str, role: content_pb2.Role.ValueType = content_pb2.ROLE_AGENT) -> relay_pb2.Item:
    part = content_pb2.ContentPart(text=content_pb2.TextPart(text=text))
    message = event_pb2.MessageCompleted(message_id=message_id, role=role, content=[part], finish_reason="end")
    return event("message.completed", message_completed=message)


def started(execution: str = "e1") -> relay_pb2.Item:
    return event("execution.started", execution, execution_started=event_pb2.ExecutionStarted())


def frame(index: int, entity: str, **body: object) -> relay_pb2.Item:
    inner = frame_pb2.Frame(frame_index=index, entity_id=entity, **body)  # type: ignore[arg-type]
    return relay_pb2.Item(frame=relay_pb2.FrameItem(execution_id="e1", epoch=1, frame=inner))


def delta(index: int, entity: str, text: str) -> relay_pb2.Item:
    return frame(index, entity, text_delta=frame_pb2.TextDelta(text=text))


def view(*items: relay_pb2.Item) -> Transcript:
    transcript = Transcript()
    for item in items:
        transcript.apply(item)
    return transcript


def shown(transcript: Transcript) -> list[tuple[str, str, bool]]:
    return [(entry.kind, entry.text, entry.final) for entry in transcript.entries]


def test_frames_build_a_preview_that_the_message_replaces() -> None:
    items = [started(), delta(0, "m", "Hel"), delta(1, "m", "lo")]
    assert shown(view(*items)) == [("agent", "Hello", False)]
    assert shown(view(*items, said("m", "Hello!"))) == [("agent", "Hello!", True)]


def test_events_alone_give_the_same_transcript() -> None:
    done = event("execution.completed", execution_completed=event_pb2.ExecutionCompleted())
    with_frames = view(started(), delta(0, "m", "Hi"), said("m", "Hi"), done)
    assert shown(with_frames) == shown(view(started(), said("m", "Hi"), done))
    assert with_frames.running == ""
    assert with_frames.outcome == "completed"


def test_a_gap_marks_previews_as_broken_until_the_message_comes() -> None:
    gap = relay_pb2.Item(gap=relay_pb2.Gap(execution_id="e1", epoch=1))
    broken = view(started(), delta(0, "m", "He"), gap)
    assert broken.entries[0].broken
    broken.apply(said("m", "Hello"))
    assert broken.entries == [Entry("m", "agent", "Hello", status="end", final=True, execution_id="e1")]


def test_a_preview_whose_beginning_may_be_in_a_gap_is_broken() -> None:
    gap = relay_pb2.Item(gap=relay_pb2.Gap(execution_id="e1", epoch=1, to=3))
    usage = frame(4, "e1", usage=frame_pb2.UsageUpdate())
    behind = view(started(), gap, usage, delta(5, "m", "two."), delta(6, "m", "!"), delta(7, "n", "Whole"))
    assert [(entry.text, entry.broken) for entry in behind.entries] == [("two.!", True), ("Whole", False)]
    behind.apply(said("m", "Forty-two.!"))
    assert not behind.entries[0].broken
    tool = view(started(), gap, frame(4, "t", tool_started=frame_pb2.ToolStarted(name="shell")))
    assert not tool.entries[0].broken


def test_an_id_that_comes_again_in_another_execution_is_another_thing() -> None:
    def call(execution: str, output: str) -> relay_pb2.Item:
        tool = event_pb2.ToolCompleted(tool_call_id="call-1", name="shell", output=output)
        return event("tool.completed", execution, tool_completed=tool)

    transcript = view(started("e0"), call("e0", "one"), started("e1"))
    transcript.apply(frame(0, "call-1", tool_output=frame_pb2.ToolOutput(text="tw")))
    assert [entry.text for entry in transcript.entries] == ["one", "tw"]
    transcript.apply(call("e1", "two"))
    assert [(entry.text, entry.final) for entry in transcript.entries] == [("one", True), ("two", True)]


def test_a_gap_of_one_execution_breaks_nothing_of_the_next() -> None:
    gap = relay_pb2.Item(gap=relay_pb2.Gap(execution_id="e0", epoch=1, to=0))
    ended = event("execution.completed", "e0", execution_completed=event_pb2.ExecutionCompleted())
    for between in ([ended, started()], [started()], [relay_pb2.Item(reset=relay_pb2.Reset())]):
        usage = frame(0, "e1", usage=frame_pb2.UsageUpdate())
        assert not view(started("e0"), gap, *between, usage, delta(1, "m", "whole")).entries[0].broken


def test_a_reset_throws_previews_away_and_keeps_messages() -> None:
    reset = relay_pb2.Item(reset=relay_pb2.Reset(execution_id="e1", epoch=2))
    assert shown(view(started(), said("a", "kept"), delta(0, "m", "lost"), reset)) == [("agent", "kept", True)]


def test_an_ending_drops_what_never_became_a_message() -> None:
    failed = event("execution.failed", execution_failed=event_pb2.ExecutionFailed(code="AGENT_EXITED"))
    assert shown(view(started(), delta(0, "m", "half"), failed)) == []


def test_a_late_delta_does_not_change_a_final_message() -> None:
    assert shown(view(started(), said("m", "done"), delta(9, "m", "more"))) == [("agent", "done", True)]


def test_a_tool_call_goes_from_frames_to_its_result() -> None:
    transcript = view(
        started(),
        frame(0, "t", tool_started=frame_pb2.ToolStarted(name="shell")),
        frame(1, "t", tool_delta=frame_pb2.ToolDelta(status="in_progress")),
        frame(2, "t", tool_output=frame_pb2.ToolOutput(text="a")),
        frame(3, "t", tool_output=frame_pb2.ToolOutput(text="ab", replace=True)),
    )
    assert [(e.title, e.status, e.text) for e in transcript.entries] == [("shell", "in_progress", "ab")]
    tool = event_pb2.ToolCompleted(tool_call_id="t", name="shell", output="abc", status=event_pb2.TOOL_STATUS_SUCCEEDED)
    transcript.apply(event("tool.completed", tool_completed=tool))
    assert [(e.title, e.status, e.text, e.final) for e in transcript.entries] == [("shell", "succeeded", "abc", True)]


def test_unknown_items_and_types_are_ignored() -> None:
    custom = event("acme.example/x", custom=event_pb2.CustomEvent(type="acme.example/x"))
    assert shown(view(custom, relay_pb2.Item())) == []


def test_ready_and_incompleteness_are_remembered() -> None:
    marked = event("history.incomplete", history_incomplete=event_pb2.HistoryIncomplete(reason="lost"))
    transcript = view(relay_pb2.Item(ready=relay_pb2.Ready()), marked)
    assert transcript.ready
    assert transcript.incomplete


@pytest.mark.parametrize("word", ["completed", "paused", "stopped", "failed", "lost"])
def test_every_ending_has_a_summary(word: str) -> None:
    body = getattr(event_pb2, f"Execution{word.capitalize()}")(summary=event_pb2.EndingSummary(how="warm"))
    item = event(f"execution.{word}", **{f"execution_{word}": body}).event.event
    assert is_ending(item.type)
    summary = ending_summary(item)
    assert summary is not None
    assert summary.how == "warm"


def test_other_events_have_no_summary() -> None:
    assert ending_summary(started().event.event) is None


def test_parts_that_are_no_text_are_named() -> None:
    parts = [
        content_pb2.ContentPart(text=content_pb2.TextPart(text="see ")),
        content_pb2.ContentPart(resource_link=content_pb2.ResourceLinkPart(uri="file:///x")),
        content_pb2.ContentPart(attachment=content_pb2.AttachmentPart(name="a.txt")),
        content_pb2.ContentPart(inline_media=content_pb2.InlineMediaPart(media_type="image/png")),
    ]
    assert text_of(parts) == "see [file:///x][a.txt][image/png]"


def asked(interaction_id: str) -> relay_pb2.Item:
    body = event_pb2.InteractionRequested(interaction_id=interaction_id, tool_name="search")
    return event("interaction.requested", interaction_requested=body)


def test_what_the_agent_asks_is_open_until_somebody_answered_or_it_was_closed() -> None:
    answered = event_pb2.InteractionAnswered(interaction_id="a", decision=event_pb2.DECISION_ALLOWED)
    resolved = event_pb2.InteractionResolved(interaction_id="b")
    transcript = view(started(), asked("a"), asked("b"), asked("c"))
    assert list(transcript.asked) == ["a", "b", "c"]
    transcript.apply(event("interaction.answered", interaction_answered=answered))
    transcript.apply(event("interaction.resolved", interaction_resolved=resolved))
    # What the policy decided was never asked of anybody.
    transcript.apply(event("interaction.resolved", interaction_resolved=resolved))
    assert list(transcript.asked) == ["c"]
    paused = event("execution.paused", execution_paused=event_pb2.ExecutionPaused(interaction_ids=["c"]))
    transcript.apply(paused)
    assert (list(transcript.asked), transcript.running, transcript.outcome) == (["c"], "", "paused")


def test_inputs_wait_from_being_queued_until_they_run_or_are_removed() -> None:
    def content(text: str) -> list[content_pb2.ContentPart]:
        return [content_pb2.ContentPart(text=content_pb2.TextPart(text=text))]

    def queued(input_id: str, text: str) -> relay_pb2.Item:
        return event("input.queued", input_queued=event_pb2.InputQueued(input_id=input_id, content=content(text)))

    transcript = view(started(), queued("i", "one"), queued("j", "two"), queued("k", "three"))
    updated = event_pb2.InputUpdated(input_id="j", content=content("zwei"))
    transcript.apply(event("input.updated", input_updated=updated))
    assert transcript.waiting == {"i": "one", "j": "zwei", "k": "three"}
    transcript.apply(event("input.promoted", input_promoted=event_pb2.InputPromoted(input_id="i", execution_id="e2")))
    transcript.apply(event("input.removed", input_removed=event_pb2.InputRemoved(input_id="j", reason="user")))
    assert transcript.waiting == {"k": "three"}
    # Of an input that has left the queue nothing is heard again.
    transcript.apply(event("input.updated", input_updated=updated))
    assert transcript.waiting == {"k": "three"}
