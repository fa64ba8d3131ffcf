"""Which events the log can hold: every rule, and the field that a refusal names."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hearth.history.v1 import history_pb2, history_service_pb2
from hearth.types.v1 import content_pb2, event_pb2, session_pb2
from services.chassis.errors import InvalidArgument
from services.history import wire
from services.history.ledger import INVALID, SET_ABORTED, Decision, Kind, Manifest, Record
from services.history.validate import (
    MAX_ATOMIC_BYTES,
    MAX_EVENT_BYTES,
    CheckedSet,
    Refused,
    check_event,
    check_request,
)
from tests.support import events

RUN = events.Run(3)
VALID = {
    "execution.started": RUN.started(),
    "execution.completed": RUN.completed(),
    "execution.failed": RUN.failed(),
    "execution.stopped": RUN.stopped(),
    "execution.lost": RUN.lost(),
    "message.completed": RUN.message(),
    "tool.completed": RUN.tool(),
    "user message": events.user_message(),
    "input.queued": events.input_queued(),
    "interaction.requested": events.interaction_requested(),
    "history.incomplete": events.gap(),
    "custom": events.custom(10),
}
KINDS = {
    "execution.started": Kind.STARTED,
    "message.completed": Kind.OUTPUT,
    "tool.completed": Kind.OUTPUT,
    "history.incomplete": Kind.GAP,
}


def checked(event: event_pb2.Event) -> Record:
    found = check_event(event.SerializeToString())
    assert isinstance(found, Record), found
    return found


def problems(event: event_pb2.Event) -> dict[str, str]:
    found = check_event(event.SerializeToString())
    assert isinstance(found, Refused), "accepted"
    assert found.reason == "INVALID_FIELD"
    return dict(found.problems)


def changed(event: event_pb2.Event, change: Callable[[event_pb2.Event], object]) -> event_pb2.Event:
    copy = event_pb2.Event()
    copy.CopyFrom(event)
    change(copy)
    return copy


@pytest.mark.parametrize("name", VALID)
def test_valid_events_become_records(name: str) -> None:
    event = VALID[name]
    found = checked(event)
    assert (found.event_id, found.type, found.epoch) == (event.event_id, event.type, event.epoch)
    assert found.raw == event.SerializeToString()
    runner = event.scope == event_pb2.EVENT_SCOPE_RUNNER
    assert found.execution_id == (RUN.execution_id if runner else "")
    ending = name.startswith("execution.") and name != "execution.started"
    assert found.kind is KINDS.get(name, Kind.ENDING if ending else Kind.SESSION)
    assert (found.manifest is not None) == ending


def test_an_ending_tells_its_manifest() -> None:
    run = events.Run()
    run.message()
    assert checked(run.completed(incomplete="spill lost")).manifest == Manifest(1, True, "spill lost")


def test_the_scope_of_a_custom_event_decides_what_it_is() -> None:
    own = changed(RUN.message(), lambda it: it.custom.MergeFrom(event_pb2.CustomEvent(type="a.example/b")))
    own.type = "a.example/b"
    assert checked(own).kind is Kind.OUTPUT
    assert checked(events.custom()).kind is Kind.SESSION


def test_ids_are_compared_in_lower_case() -> None:
    upper = changed(RUN.message(), lambda it: setattr(it, "event_id", it.event_id.upper()))
    assert checked(upper).event_id == upper.event_id.lower()


@pytest.mark.parametrize(
    ("name", "field", "change"),
    [
        ("message.completed", "event_id", lambda it: setattr(it, "event_id", "1")),
        ("message.completed", "event_id", lambda it: setattr(it, "event_id", "")),
        ("message.completed", "type", lambda it: setattr(it, "type", "tool.completed")),
        ("message.completed", "type", lambda it: setattr(it, "type", "")),
        ("message.completed", "entity_id", lambda it: setattr(it, "entity_id", "x" * 256)),
        ("message.completed", "execution_id", lambda it: setattr(it, "execution_id", "")),
        ("message.completed", "epoch", lambda it: setattr(it, "epoch", 0)),
        ("message.completed", "epoch", lambda it: setattr(it, "epoch", 2**63)),
        ("message.completed", "scope", lambda it: setattr(it, "scope", 0)),
        ("message.completed", "scope", lambda it: setattr(it, "scope", 7)),
        ("message.completed", "body", lambda it: it.ClearField("message_completed")),
        ("message.completed", "occurred_at", lambda it: setattr(it.occurred_at, "seconds", 2**60)),
        ("message.completed", "occurred_at", lambda it: setattr(it.occurred_at, "nanos", -1)),
        ("message.completed", "message_completed.message_id", lambda it: it.message_completed.ClearField("message_id")),
        ("message.completed", "message_completed.role", lambda it: it.message_completed.ClearField("role")),
        (
            "message.completed",
            "message_completed.role",
            lambda it: setattr(it.message_completed, "role", content_pb2.ROLE_USER),
        ),
        ("user message", "message_completed.role", lambda it: setattr(it.message_completed, "role", 2)),
        ("user message", "epoch", lambda it: setattr(it, "epoch", 1)),
        ("user message", "execution_id", lambda it: setattr(it, "execution_id", "x")),
        ("tool.completed", "scope", lambda it: setattr(it, "scope", 2)),
        ("tool.completed", "tool_completed.name", lambda it: it.tool_completed.ClearField("name")),
        ("tool.completed", "tool_completed.input_json", lambda it: it.tool_completed.ClearField("input_json")),
        ("tool.completed", "tool_completed.status", lambda it: it.tool_completed.ClearField("status")),
        ("input.queued", "scope", lambda it: setattr(it, "scope", 1)),
        ("input.queued", "input_queued.input_id", lambda it: it.input_queued.ClearField("input_id")),
        ("interaction.requested", "interaction_requested.kind", lambda it: it.interaction_requested.ClearField("kind")),
        ("history.incomplete", "history_incomplete.reason", lambda it: it.history_incomplete.ClearField("reason")),
        (
            "execution.completed",
            "execution_completed.summary.manifest",
            lambda it: it.execution_completed.summary.ClearField("manifest"),
        ),
        (
            "execution.completed",
            "execution_completed.summary.manifest",
            lambda it: it.execution_completed.ClearField("summary"),
        ),
        ("execution.failed", "execution_failed.code", lambda it: it.execution_failed.ClearField("code")),
        (
            "execution.lost",
            "execution_lost.summary.manifest.incomplete",
            lambda it: it.execution_lost.summary.manifest.ClearField("incomplete"),
        ),
        ("custom", "type", lambda it: setattr(it, "type", "other.example/note")),
    ],
)
def test_a_wrong_field_is_named(name: str, field: str, change: Callable[[event_pb2.Event], object]) -> None:
    assert field in problems(changed(VALID[name], change))


def test_a_custom_event_cannot_take_a_type_of_the_contract() -> None:
    assert "custom.type" in problems(events.custom(event_type="execution.completed"))
    assert "custom.type" in problems(events.custom(event_type=""))


def test_a_refusal_does_not_repeat_what_was_sent() -> None:
    """It has to fit into an answer, beside those of a thousand others."""
    event = events.custom(event_type="\0" * (MAX_EVENT_BYTES - 500))
    event.type, event.entity_id, event.execution_id, event.epoch = "x", "e" * 256, "x", 0
    event.scope = event_pb2.EVENT_SCOPE_RUNNER
    found = problems(event)
    assert set(found) == {"type", "entity_id", "execution_id", "epoch", "custom.type"}
    assert sum(map(len, found.values())) < 500


def test_what_is_no_event_is_refused() -> None:
    for data in (b"\xff", b"\x0a\x05ab", event_pb2.Event(event_id="x").SerializeToString() + b"\x0a\x01\xff"):
        assert isinstance(check_event(data), Refused)
    assert isinstance(check_event(b""), Refused)


def test_a_body_that_would_not_parse_is_refused_although_it_is_passed_through() -> None:
    data = RUN.message().SerializeToString() + b"\xf2\x01\x03\x0a\x01\xff"
    assert wire.parse_event(data).WhichOneof("body") == "message_completed"
    assert isinstance(check_event(data), Refused)


@given(st.binary(max_size=200))
def test_no_bytes_raise(data: bytes) -> None:
    assert isinstance(check_event(data), Record | Refused)


def test_the_size_of_an_event_is_bounded() -> None:
    small = events.custom(MAX_EVENT_BYTES - 200)
    assert isinstance(check_event(small.SerializeToString()), Record)
    large = check_event(events.custom(MAX_EVENT_BYTES).SerializeToString())
    assert isinstance(large, Refused)
    assert large.reason == "TOO_LARGE"


def test_equal_content_has_an_equal_digest_whatever_else_differs() -> None:
    event = RUN.message("same")
    first = checked(event).digest
    other_time = changed(event, lambda it: it.occurred_at.FromSeconds(5))
    other_fence = changed(other_time, lambda it: setattr(it, "epoch", 9))
    other_fence.frames_through = 4
    assert checked(other_fence).digest == first


@pytest.mark.parametrize(
    "change",
    [
        lambda it: setattr(it, "entity_id", "other"),
        lambda it: setattr(it, "execution_id", events.new_id()),
        lambda it: setattr(it.message_completed, "finish_reason", "stopped"),
        lambda it: it.message_completed.content.add(),
    ],
)
def test_other_content_has_another_digest(change: Callable[[event_pb2.Event], object]) -> None:
    event = RUN.message("same")
    assert checked(changed(event, change)).digest != checked(event).digest


def test_neighbouring_fields_cannot_be_shifted_into_each_other() -> None:
    first, second = events.custom(event_type="ab"), events.custom(event_type="a")
    first.entity_id, second.entity_id = "c", "bc"
    assert checked(first).digest != checked(second).digest


def check(*sets: history_pb2.AppendSet) -> list[CheckedSet]:
    data = history_service_pb2.AppendEventsRequest(sets=sets).SerializeToString()
    return check_request(wire.parse_append(data).sets)


def test_a_bad_event_is_answered_in_its_place_and_its_neighbours_go_on() -> None:
    good, bad = events.user_message(), events.user_message()
    bad.event_id = "x"
    (found,) = check(events.append_set(events.key(), bad, good))
    assert [it.event_id for it in found.records] == [good.event_id]
    answers = found.complete([Decision(INVALID, reason="LOG_DELETED")])
    assert answers[0].problems[0][0] == "sets[0].events[0].event_id"
    assert answers[1].reason == "LOG_DELETED"


def test_a_bad_event_aborts_its_atomic_set() -> None:
    bad = changed(events.user_message(), lambda it: it.ClearField("type"))
    (found,) = check(events.append_set(events.key(), events.user_message(), bad, atomic=True))
    assert not found.records
    assert [it.outcome for it in found.complete([])] == [SET_ABORTED, INVALID]


def test_an_atomic_set_is_bounded_as_a_whole() -> None:
    large = [events.custom(MAX_EVENT_BYTES - 500) for _ in range(3)]
    assert len(check(events.append_set(events.key(), *large, atomic=True))[0].records) == 3
    more = [*large, events.custom(MAX_ATOMIC_BYTES - 3 * MAX_EVENT_BYTES + 2_000)]
    (found,) = check(events.append_set(events.key(), *more, atomic=True))
    assert {it.reason for it in found.complete([])} == {"TOO_LARGE"}
    assert len(check(events.append_set(events.key(), *more))[0].records) == 4


@pytest.mark.parametrize(("project", "session", "field"), [("", "s", "project"), ("p", "a b", "session")])
def test_a_set_with_a_bad_key_is_refused_event_by_event(project: str, session: str, field: str) -> None:
    key = session_pb2.SessionKey(project=project, session=session)
    bad = events.append_set(key, events.user_message(), events.user_message())
    good = events.append_set(events.key(), events.user_message())
    first, second = check(bad, good)
    assert {it.problems[0][0] for it in first.complete([])} == {f"sets[0].session.{field}"}
    assert len(first.complete([])) == 2
    assert len(second.records) == 1


def test_a_request_needs_sets_and_has_a_bounded_number_of_events() -> None:
    with pytest.raises(InvalidArgument) as refusal:
        check()
    assert refusal.value.field_violations[0][0] == "sets"
    many = [events.custom() for _ in range(1_001)]
    with pytest.raises(InvalidArgument) as too_many:
        check(events.append_set(events.key(), *many))
    assert too_many.value.reason == "TOO_LARGE"
    assert len(check(events.append_set(events.key(), *many[:1_000]))[0].records) == 1_000
