"""Facts are the same bytes under the same id however often they are made, and history takes each of them."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from hearth.types.v1 import content_pb2, event_pb2
from services.history.ledger import Record
from services.history.validate import check_event
from services.pool.control import facts
from services.pool.rows import Fact

NOW = datetime(2026, 1, 1, tzinfo=UTC)
EXECUTION = "11111111-1111-4111-8111-111111111111"
INPUT = "22222222-2222-4222-8222-222222222222"
COMMAND = "33333333-3333-4333-8333-333333333333"
TEXT = [content_pb2.ContentPart(text=content_pb2.TextPart(text="hello"))]


def all_facts() -> list[Fact]:
    return [
        facts.started(EXECUTION, 3, input_id=INPUT, agent="scripted", model="", at=NOW),
        facts.user_message(EXECUTION, INPUT, TEXT, NOW),
        facts.input_queued(INPUT, TEXT, NOW),
        facts.input_promoted(INPUT, EXECUTION, NOW),
        facts.input_removed(INPUT, "user", NOW),
        facts.input_updated(INPUT, "request", TEXT, NOW),
        facts.stopped(EXECUTION, 3, reason="user", command_id=COMMAND, at=NOW),
        facts.stopped(EXECUTION, 4, reason="killed", command_id=None, at=NOW, incomplete="killed"),
        facts.failed(EXECUTION, 3, code="START_FAILED", message="it did not start", at=NOW),
        facts.lost(EXECUTION, 4, reason="gone", at=NOW),
        facts.paused(EXECUTION, 4, interaction_ids=[INPUT], at=NOW, incomplete="gone"),
        facts.history_incomplete(EXECUTION, "refused", NOW),
    ]


@pytest.mark.parametrize("fact", all_facts(), ids=lambda fact: event_pb2.Event.FromString(fact.event).type)
def test_history_takes_it(fact: Fact) -> None:
    assert isinstance(check_event(fact.event), Record)
    event = event_pb2.Event.FromString(fact.event)
    assert event.event_id == fact.event_id


def test_the_same_fact_is_the_same_bytes_and_another_has_another_id() -> None:
    assert all_facts() == all_facts()
    assert len({fact.event_id for fact in all_facts()}) == len(all_facts())


def test_what_starts_and_ends_is_marked() -> None:
    marks = {event_pb2.Event.FromString(fact.event).type: fact.transition for fact in all_facts() if fact.transition}
    assert marks.pop("execution.started") == facts.STARTED
    assert set(marks.values()) == {facts.ENDED}
    assert set(marks) == {f"execution.{kind}" for kind in ("stopped", "failed", "lost", "paused")}


def test_an_ending_can_be_made_incomplete() -> None:
    ending = facts.stopped(EXECUTION, 3, reason="user", command_id=COMMAND, at=NOW)
    changed = event_pb2.Event.FromString(facts.with_incomplete_manifest(ending.event, "2 are missing"))
    assert changed.execution_stopped.summary.manifest.incomplete
    assert changed.execution_stopped.summary.manifest.incomplete_reason == "2 are missing"
    assert changed.event_id == ending.event_id
