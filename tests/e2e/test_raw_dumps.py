"""Lateness, contiguity and equality, recomputed from what `watch --json` and `history --json` print."""

from __future__ import annotations

import uuid
from typing import Any

import pytest

from tests.support.cli import Following, Hearth

pytestmark = pytest.mark.asyncio(loop_scope="session")


def events_of(items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [item["event"] for item in items if "event" in item]


def frames_of(items: list[dict[str, Any]], execution_id: str) -> list[dict[str, Any]]:
    return [item["frame"] for item in items if item.get("frame", {}).get("execution_id") == execution_id]


def ended(items: list[dict[str, Any]], execution_id: str) -> bool:
    endings = {"execution.completed", "execution.stopped", "execution.failed", "execution.lost", "execution.paused"}
    return any(e["event"]["type"] in endings and e["event"]["execution_id"] == execution_id for e in events_of(items))


def text_by_message(items: list[dict[str, Any]], execution_id: str) -> dict[str, str]:
    texts: dict[str, str] = {}
    for frame in frames_of(items, execution_id):
        delta = frame["frame"].get("text_delta")
        if delta is not None:
            entity = frame["frame"]["entity_id"]
            texts[entity] = texts.get(entity, "") + delta.get("text", "")
    return texts


def message_texts(items: list[dict[str, Any]], execution_id: str) -> dict[str, str]:
    texts = {}
    for item in events_of(items):
        message = item["event"].get("message_completed")
        if message and message["role"] == "ROLE_AGENT" and item["event"]["execution_id"] == execution_id:
            texts[message["message_id"]] = "".join(part["text"].get("text", "") for part in message["content"])
    return texts


async def test_two_readers_and_the_history_agree(hearth: Hearth) -> None:
    session = f"dumps-{uuid.uuid4().hex[:8]}"
    async with hearth.watching(session) as first:
        sent = (await hearth.run("send", session, "stream 3000 words at 45/s", "--json")).json()
        execution = sent["started"]["execution"]["execution_id"]
        await first.until(lambda items: len(frames_of(items, execution)) >= 10)
        async with hearth.watching(session) as late:
            # The answer lasts until both have seen some of it, however long a reader takes to start.
            await late.until(lambda items: len(frames_of(items, execution)) >= 10)
            assert (await hearth.run("stop", session)).code == 0
            await first.until(lambda items: ended(items, execution))
            await late.until(lambda items: ended(items, execution))
            check_lateness(first, late, execution)
            log = (await hearth.run("history", session, "--json")).lines()
            for reader in (first, late):
                assert events_of(reader.items) == log[: len(events_of(reader.items))]
                assert text_by_message(reader.items, execution) == message_texts(reader.items, execution) != {}
                assert not [item for item in reader.items if "gap" in item]
    assert [int(item["cursor"]["sequence"]) for item in log] == list(range(1, len(log) + 1))
    assert {item["cursor"]["log_id"] for item in log} == {log[0]["cursor"]["log_id"]}
    for item in log:
        assert item["cursor"]["tag"] == item["event"]["event_id"].replace("-", "")[:16]


def check_lateness(first: Following, late: Following, execution: str) -> None:
    """The late reader began after the first saw frames, and while the answer still ran."""
    first_frames_at = next(at for at, item in zip(first.arrived, first.items, strict=True) if "frame" in item)
    ending_at = next(at for at, item in zip(first.arrived, first.items, strict=True) if ended([item], execution))
    assert first_frames_at < late.arrived[0] < ending_at
    ready = next(index for index, item in enumerate(late.items) if "ready" in item)
    assert not ended(late.items[:ready], execution)


async def test_a_replay_from_any_sequence_is_the_rest_of_the_log(hearth: Hearth) -> None:
    session = f"replay-{uuid.uuid4().hex[:8]}"
    assert (await hearth.run("send", session, "hello", "--wait")).code == 0
    log = (await hearth.run("history", session, "--json")).lines()
    assert len(log) >= 4
    for after in range(1, len(log) + 1):
        rest = (await hearth.run("history", session, "--after", str(after), "--json")).lines()
        assert rest == log[after:]


async def test_a_cursor_above_the_head_is_refused_with_its_reason(hearth: Hearth) -> None:
    session = f"ahead-{uuid.uuid4().hex[:8]}"
    assert (await hearth.run("send", session, "hello", "--wait")).code == 0
    refused = await hearth.run("history", session, "--after", "9999")
    assert refused.code == 4
    assert "CURSOR_AHEAD" in refused.stderr
    refused = await hearth.run("watch", session, "--after", "9999")
    assert refused.code == 4
    assert "CURSOR_AHEAD" in refused.stderr
