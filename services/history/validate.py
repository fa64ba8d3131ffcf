"""Is this event one that the log can hold? Pure checks of what a producer sent, each with the field that is wrong.

An event that passes is parsed as a whole once, so that no reader can ever be handed bytes that do not parse; what is
stored are the bytes themselves.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from google.protobuf.message import DecodeError

from hearth.types.v1 import content_pb2, event_pb2
from services.chassis import fields
from services.chassis.errors import InvalidArgument, invalid
from services.history import wire
from services.history.ledger import INVALID, SET_ABORTED, Decision, Kind, Manifest, Record

MAX_EVENT_BYTES = 1024 * 1024
MAX_ATOMIC_BYTES = 3 * 1024 * 1024
MAX_REQUEST_EVENTS = 1_000

_MAX_NAME = 255
_is_uuid = re.compile(r"[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}").fullmatch
_MAX_EPOCH = 2**63 - 1
_RUNNER = event_pb2.EVENT_SCOPE_RUNNER
_SESSION = event_pb2.EVENT_SCOPE_SESSION
_SCOPE_NAMES: dict[int, str] = {_RUNNER: "EVENT_SCOPE_RUNNER", _SESSION: "EVENT_SCOPE_SESSION"}
# What google.protobuf.Timestamp can mean: years 1 to 9999.
_FIRST_SECOND, _LAST_SECOND = -62_135_596_800, 253_402_300_799

Key = tuple[str, str]
Problem = tuple[str, str]
Problems = Iterator[Problem]


@dataclass(slots=True)
class CheckedSet:
    """A set, checked. `decisions` has one place for each event, None where its record waits to be decided."""

    key: Key
    atomic: bool
    records: list[Record]
    decisions: list[Decision | None]
    traceparent: str = ""

    def complete(self, decided: Sequence[Decision]) -> list[Decision]:
        """All answers, in the order of the events; `decided` are those for `records`."""
        rest = iter(decided)
        return [next(rest) if decision is None else decision for decision in self.decisions]


def check_request(sets: Sequence[wire.RawSet]) -> list[CheckedSet]:
    """The sets of a request, each checked. Raises `InvalidArgument` for what concerns no single event."""
    if not sets:
        raise invalid("sets", "must not be empty")
    events = sum(len(found.events) for found in sets)
    if events > MAX_REQUEST_EVENTS:
        raise invalid(
            "sets", f"must hold at most {MAX_REQUEST_EVENTS} events together, it has {events}", reason="TOO_LARGE"
        )
    return [check_set(found, f"sets[{index}]") for index, found in enumerate(sets)]


def check_set(found: wire.RawSet, path: str) -> CheckedSet:
    """One set; `path` is where it stands in the request."""
    events = found.events
    try:
        key = _key(found.session.project, found.session.session)
    except InvalidArgument as refusal:
        problems = [(f"{path}.{field}", description) for field, description in refusal.field_violations]
        return _refused(("", ""), found, refusal.reason, problems)
    if found.atomic and sum(map(len, events)) > MAX_ATOMIC_BYTES:
        problem = (f"{path}.events", f"an atomic set must be at most {MAX_ATOMIC_BYTES} bytes together")
        return _refused(key, found, "TOO_LARGE", (problem,))
    records: list[Record] = []
    decisions: list[Decision | None] = []
    for index, event in enumerate(events):
        checked = check_event(event)
        if isinstance(checked, Record):
            records.append(checked)
            decisions.append(None)
        else:
            decisions.append(checked.decision(f"{path}.events[{index}]"))
    if found.atomic and len(records) < len(events):
        return CheckedSet(key, True, [], [decision or Decision(SET_ABORTED) for decision in decisions])
    traceparent = found.traceparent if len(found.traceparent) <= _MAX_NAME else ""
    return CheckedSet(key, found.atomic, records, decisions, traceparent)


@lru_cache(maxsize=8_192)
def _key(project: str, session: str) -> Key:
    return fields.session_key(project, session)


def _refused(key: Key, found: wire.RawSet, reason: str, problems: Sequence[Problem]) -> CheckedSet:
    decision = Decision(INVALID, reason=reason, problems=tuple(problems))
    return CheckedSet(key, found.atomic, [], [decision] * len(found.events))


class Refused(NamedTuple):
    """Why an event cannot be held; field paths begin at the event."""

    reason: str
    problems: tuple[Problem, ...]

    def decision(self, path: str) -> Decision:
        """The answer, with the fields named from the request on."""
        named = tuple((f"{path}.{field}" if field else path, description) for field, description in self.problems)
        return Decision(INVALID, reason=self.reason, problems=named)


def check_event(data: bytes) -> Record | Refused:
    """The record of a serialized event, or why there is none."""
    if len(data) > MAX_EVENT_BYTES:
        text = f"must be at most {MAX_EVENT_BYTES} bytes, it has {len(data)}"
        return Refused("TOO_LARGE", (("", text),))
    try:
        raw = wire.parse_event(data)
        event = event_pb2.Event.FromString(data)
    except DecodeError:
        return Refused("INVALID_FIELD", (("", "is not a hearth.types.v1.Event"),))
    case = raw.WhichOneof("body")
    rule = _RULES.get(case or "")
    if case is None or rule is None:
        return Refused("INVALID_FIELD", (("body", "must be set"),))
    body: Any = getattr(event, case)
    problems = (*_header(raw, rule, body), *_time(event), *_body(rule, raw, body, case))
    if problems:
        return Refused("INVALID_FIELD", problems)
    return _record(data, raw, rule, wire.body_bytes(raw, case), body)


def _record(data: bytes, raw: wire.RawEvent, rule: _Rule, content: bytes, body: Any) -> Record:
    runner = raw.scope == _RUNNER
    execution_id = raw.execution_id.lower()
    kind = rule.kind if rule.kind is not Kind.OUTPUT or runner else Kind.SESSION
    manifest = None
    if kind is Kind.ENDING:
        told = body.summary.manifest
        manifest = Manifest(told.runner_events, told.incomplete, told.incomplete_reason)
    return Record(
        event_id=raw.event_id.lower(),
        digest=digest(raw, execution_id, content),
        kind=kind,
        type=raw.type,
        execution_id=execution_id if runner else "",
        epoch=raw.epoch,
        raw=data,
        manifest=manifest,
        gap_reason=body.reason if kind is Kind.GAP else "",
    )


def digest(raw: wire.RawEvent, execution_id: str, content: bytes) -> bytes:
    """SHA-256 over what makes two events equal; lengths stand first, so no two different events give one text."""
    kind, entity = raw.type.encode(), raw.entity_id.encode()
    head = f"{raw.scope} {len(kind)} {len(execution_id)} {len(entity)} ".encode()
    return hashlib.sha256(b"".join((head, kind, execution_id.encode(), entity, content))).digest()


def _header(raw: wire.RawEvent, rule: _Rule, body: Any) -> Problems:
    if not _is_uuid(raw.event_id):
        yield "event_id", "must be a uuid of the form 8-4-4-4-12 hexadecimal digits"
    wanted = rule.type or body.type
    if raw.type != wanted:
        # What is told never holds what somebody sent: it may be as long as an event.
        yield "type", f"must be {rule.type!r}, the type of the body" if rule.type else "must be the same as custom.type"
    if len(raw.entity_id) > _MAX_NAME:
        yield "entity_id", f"must be at most {_MAX_NAME} characters"
    if raw.scope == _RUNNER:
        if not _is_uuid(raw.execution_id):
            yield "execution_id", "must be a uuid: an event of scope RUNNER belongs to an execution"
        if not 1 <= raw.epoch <= _MAX_EPOCH:
            yield "epoch", f"must be between 1 and {_MAX_EPOCH} with scope RUNNER"
    elif raw.scope == _SESSION:
        if raw.execution_id and not _is_uuid(raw.execution_id):
            yield "execution_id", "must be empty or a uuid"
        if raw.epoch:
            yield "epoch", "must be 0 with scope SESSION"
    else:
        yield "scope", "must be EVENT_SCOPE_RUNNER or EVENT_SCOPE_SESSION"
        return
    if raw.scope not in rule.scopes:
        yield "scope", f"must be {_SCOPE_NAMES[rule.scopes[0]]} for {wanted}"


def _time(event: event_pb2.Event) -> Problems:
    if event.HasField("occurred_at"):
        at = event.occurred_at
        if not (_FIRST_SECOND <= at.seconds <= _LAST_SECOND and 0 <= at.nanos < 10**9):
            yield "occurred_at", "must be a time between the years 1 and 9999"


def _body(rule: _Rule, raw: wire.RawEvent, body: Any, case: str) -> Problems:
    for field in rule.required:
        if not getattr(body, field):
            yield f"{case}.{field}", "must be set"
    if rule.kind is Kind.ENDING and not body.summary.HasField("manifest"):
        yield f"{case}.summary.manifest", "must be set: an ending says what it counted"
    if rule.check is not None:
        for field, description in rule.check(raw, body):
            yield f"{case}.{field}", description


def _check_message(raw: wire.RawEvent, body: event_pb2.MessageCompleted) -> Problems:
    if (body.role == content_pb2.ROLE_USER) != (raw.scope == _SESSION):
        yield "role", "must be ROLE_USER with scope SESSION, and ROLE_AGENT or ROLE_THOUGHT with scope RUNNER"


def _check_lost(_raw: wire.RawEvent, body: event_pb2.ExecutionLost) -> Problems:
    if not body.summary.manifest.incomplete:
        yield "summary.manifest.incomplete", "must be true: nobody knows what a lost runner still held"


def _check_custom(_raw: wire.RawEvent, body: event_pb2.CustomEvent) -> Problems:
    if body.type in _TYPES:
        yield "type", f"must not be {body.type!r}, which has a body of its own"
    if len(body.type) > _MAX_NAME:
        yield "type", f"must be at most {_MAX_NAME} characters"


class _Rule(NamedTuple):
    """What holds for one type of event. An empty `type` is that inside of the body."""

    type: str
    kind: Kind
    scopes: tuple[int, ...]
    required: tuple[str, ...] = ()
    check: Callable[[wire.RawEvent, Any], Problems] | None = None


_RULES: dict[str, _Rule] = {
    "execution_started": _Rule("execution.started", Kind.STARTED, (_RUNNER,)),
    "execution_completed": _Rule("execution.completed", Kind.ENDING, (_RUNNER,)),
    "execution_paused": _Rule("execution.paused", Kind.ENDING, (_RUNNER,)),
    "execution_stopped": _Rule("execution.stopped", Kind.ENDING, (_RUNNER,)),
    "execution_failed": _Rule("execution.failed", Kind.ENDING, (_RUNNER,), ("code",)),
    "execution_lost": _Rule("execution.lost", Kind.ENDING, (_RUNNER,), (), _check_lost),
    "message_completed": _Rule(
        "message.completed", Kind.OUTPUT, (_RUNNER, _SESSION), ("message_id", "role"), _check_message
    ),
    "tool_completed": _Rule(
        "tool.completed", Kind.OUTPUT, (_RUNNER,), ("tool_call_id", "name", "input_json", "status")
    ),
    "interaction_requested": _Rule("interaction.requested", Kind.SESSION, (_SESSION,), ("interaction_id", "kind")),
    "interaction_answered": _Rule("interaction.answered", Kind.SESSION, (_SESSION,), ("interaction_id",)),
    "interaction_resolved": _Rule("interaction.resolved", Kind.SESSION, (_SESSION,), ("interaction_id", "resolution")),
    "input_queued": _Rule("input.queued", Kind.SESSION, (_SESSION,), ("input_id",)),
    "input_promoted": _Rule("input.promoted", Kind.SESSION, (_SESSION,), ("input_id", "execution_id")),
    "input_removed": _Rule("input.removed", Kind.SESSION, (_SESSION,), ("input_id",)),
    "input_updated": _Rule("input.updated", Kind.SESSION, (_SESSION,), ("input_id",)),
    "history_incomplete": _Rule("history.incomplete", Kind.GAP, (_SESSION,), ("reason",)),
    "custom": _Rule("", Kind.OUTPUT, (_RUNNER, _SESSION), ("type",), _check_custom),
}
_TYPES = frozenset(rule.type for rule in _RULES.values() if rule.type)
