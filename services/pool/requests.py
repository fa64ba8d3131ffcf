"""What a request may say: every field checked, the wrong one named, before anything is looked up or written."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import ipaddress
import json
import re
from collections.abc import AsyncIterator, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

from google.protobuf.message import Message

from hearth.sandbox.v1 import sandbox_pb2
from hearth.secret import Secret
from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import content_pb2, event_pb2
from hearth.types.v1 import session_pb2 as types
from services.chassis import fields
from services.chassis.auth import current_caller, require_project
from services.chassis.errors import InvalidArgument, invalid
from services.chassis.fields import Violations
from services.pool import credentials
from services.pool.control.admission import OnBusy
from services.pool.control.answers import is_json
from services.pool.control.commands import Aim
from services.pool.gate_rows import AnswerRow
from services.pool.rows import Decision, Key

MAX_PARTS = 64
# The message becomes an event, which may have 1 MiB with everything around the content.
MAX_CONTENT_BYTES = 1024 * 1024 - 4096
MAX_TEXT_BYTES = 256 * 1024
MAX_MEDIA_BYTES = 1024 * 1024
MAX_INSTRUCTIONS_BYTES = 256 * 1024
MAX_SPEC_BYTES = 1024 * 1024
MAX_TRANSCRIPT_ENTRIES = 10_000
MAX_CREDENTIAL_BYTES = 64 * 1024
MAX_ANSWERS = 100
MAX_ANSWER_BYTES = 256 * 1024
MAX_NAME_BYTES = 255

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,254}")
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]{1,128}")
# What the sandbox service refuses, told when the message is sent instead of when its turn starts.
_OWN_VARIABLES = frozenset({"HOME"})
_OWN_PREFIX = "HEARTH_"
_DECISIONS = {
    event_pb2.DECISION_UNSPECIFIED: None,
    event_pb2.DECISION_ALLOWED: Decision.ALLOWED,
    event_pb2.DECISION_DENIED: Decision.DENIED,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Known:
    """What a spec may name."""

    agents: frozenset[str]
    providers: frozenset[str]


def key_of(session: types.SessionKey) -> Key:
    """The session of a request, which the caller may touch."""
    key = Key(*fields.session_key(session.project, session.session))
    require_project(key.project)
    return key


def project_of(project: str) -> str:
    """The project of a request, which the caller may touch."""
    checked = fields.key_part("project", project)
    require_project(checked)
    return checked


def fingerprint(request: Message) -> bytes:
    """SHA-256 of a request without its id: two requests with one id must have the same."""
    bare = type(request)()
    bare.CopyFrom(request)
    bare.ClearField("request_id")
    return hashlib.sha256(bare.SerializeToString(deterministic=True)).digest()


def check_content(field: str, content: Sequence[content_pb2.ContentPart]) -> None:
    """A message of a user: 1 to 64 parts with something in them, at most 1 MiB."""
    if not 1 <= len(content) <= MAX_PARTS:
        raise invalid(field, f"must have 1 to {MAX_PARTS} parts, it has {len(content)}")
    size = sum(part.ByteSize() for part in content)
    if size > MAX_CONTENT_BYTES:
        text = f"must be at most {MAX_CONTENT_BYTES} bytes, it has {size}; attach large files"
        raise invalid(field, text, reason="TOO_LARGE")
    checks = Violations()
    for index, part in enumerate(content):
        _check_part(checks, f"{field}[{index}]", part)
    checks.raise_if_any()
    if not any(part.WhichOneof("part") != "text" or part.text.text.strip() for part in content):
        raise invalid(field, "must hold something besides white space")


def _check_part(checks: Violations, path: str, part: content_pb2.ContentPart) -> None:
    match part.WhichOneof("part"):
        case "text":
            _check_text(checks, f"{path}.text.text", part.text.text, MAX_TEXT_BYTES)
        case "resource_link":
            link = part.resource_link
            if not link.uri:
                checks.add(f"{path}.resource_link.uri", "must not be empty")
            for name, value in (("uri", link.uri), ("name", link.name), ("media_type", link.media_type)):
                _check_text(checks, f"{path}.resource_link.{name}", value, 8 * 1024)
        case "attachment":
            checks.take(fields.uuid_text, f"{path}.attachment.attachment_id", part.attachment.attachment_id)
        case "inline_media":
            media = part.inline_media
            if not media.media_type or not media.data:
                checks.add(f"{path}.inline_media", "must have a media_type and data")
            _check_text(checks, f"{path}.inline_media.media_type", media.media_type, 255)
            if len(media.data) > MAX_MEDIA_BYTES:
                text = f"must be at most {MAX_MEDIA_BYTES} bytes"
                checks.add(f"{path}.inline_media.data", text, reason="TOO_LARGE")
        case _:
            checks.add(path, "must have a part set that this version knows")


def _check_text(checks: Violations, field: str, value: str, most: int) -> None:
    if "\0" in value:
        checks.add(field, "must not hold NUL characters")
    size = len(value.encode())
    if size > most:
        checks.add(field, f"must be at most {most} bytes, it has {size}", reason="TOO_LARGE")


def check_spec(spec: sessions.SessionSpec, known: Known) -> None:
    """A spec that can be applied. What it names is looked up elsewhere."""
    size = spec.ByteSize()
    if size > MAX_SPEC_BYTES:
        raise invalid("spec", f"must be at most {MAX_SPEC_BYTES} bytes, it has {size}", reason="TOO_LARGE")
    checks = Violations()
    if spec.agent and spec.agent not in known.agents:
        text = f"{spec.agent!r} is not in HEARTH_AGENTS; known are {', '.join(sorted(known.agents))}"
        checks.add("spec.agent", text, reason="UNKNOWN_AGENT")
    _check_text(checks, "spec.model", spec.model, 255)
    _check_text(checks, "spec.instructions", spec.instructions, MAX_INSTRUCTIONS_BYTES)
    for index, capability in enumerate(spec.model_capabilities):
        _check_text(checks, f"spec.model_capabilities[{index}]", capability, 255)
    _check_servers(checks, spec.mcp_servers)
    _check_bindings(checks, spec)
    for index, rule in enumerate(spec.permissions.rules):
        if not rule.tool or rule.tool.count("*") > rule.tool.endswith("*"):
            checks.add(f"spec.permissions.rules[{index}].tool", "must be a name, with `*` at its end at most")
        _check_enum(checks, f"spec.permissions.rules[{index}].action", sessions.PermissionAction, rule.action)
    _check_enum(checks, "spec.permissions.default_action", sessions.PermissionAction, spec.permissions.default_action)
    _check_sandbox(checks, spec.sandbox, known)
    for name in ("turn", "idle", "first_response", "tool_call"):
        if spec.limits.HasField(name) and getattr(spec.limits, name).ToNanoseconds() <= 0:
            checks.add(f"spec.limits.{name}", "must be longer than nothing")
    checks.raise_if_any()


def _check_bindings(checks: Violations, spec: sessions.SessionSpec) -> None:
    """Each credential has a name, and a place of its own: one that says a value already would hide one of the two."""
    headers = {server.name for server in spec.mcp_servers if server.HasField("http")}
    taken = {("", name) for name in spec.sandbox.env}
    for server in spec.mcp_servers:
        taken |= {(server.name, name) for name in server.stdio.env}
        taken |= {(server.name, name.lower()) for name in server.http.headers}
    for binding in credentials.bindings(spec):
        checks.take(credential_name, f"{binding.field}.credential", binding.credential)
        path, target = f"{binding.field}.target", binding.target
        if binding.server in headers:
            target = target.lower()
            if not _HEADER.fullmatch(target):
                checks.add(path, "must be the name of a header")
        elif not _VARIABLE.fullmatch(target):
            checks.add(path, "must be the name of an environment variable")
        elif not binding.server and (target in _OWN_VARIABLES or target.startswith(_OWN_PREFIX)):
            checks.add(path, "is set by Hearth and cannot be given")
        if (binding.server, target) in taken:
            checks.add(path, "is given more than once")
        taken.add((binding.server, target))


def credential_name(field: str, name: str) -> str:
    """The name of a credential."""
    if not _NAME.fullmatch(name):
        raise invalid(field, "must be 1 to 128 characters of A-Z a-z 0-9 _ . -")
    return name


def credential_value(value: str) -> Secret:
    """The value of a credential, which no message repeats."""
    fields.length("value", value, minimum=1, maximum=MAX_CREDENTIAL_BYTES)
    if "\0" in value:
        raise invalid("value", "must not hold NUL characters")
    return Secret(value)


async def description_of(stream: AsyncIterator[calls.PutAttachmentRequest]) -> calls.AttachmentDescription:
    """What an upload begins with."""
    async for request in stream:
        if request.WhichOneof("payload") == "description":
            return request.description
        break
    raise invalid("description", "must be set in the first message")


def moment(field: str, message: Message, name: str) -> datetime | None:
    """A time of a request; None when it was not given."""
    if not message.HasField(name):
        return None
    try:
        found: datetime = getattr(message, name).ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise invalid(field, "is no time that this version knows") from None
    return found


def _check_servers(checks: Violations, servers: Iterable[sessions.McpServer]) -> None:
    names: set[str] = set()
    for index, server in enumerate(servers):
        path = f"spec.mcp_servers[{index}]"
        if not _NAME.fullmatch(server.name):
            checks.add(f"{path}.name", "must be 1 to 128 characters of A-Z a-z 0-9 _ . -")
        elif server.name in names:
            checks.add(f"{path}.name", "must be unique in the spec")
        names.add(server.name)
        match server.WhichOneof("transport"):
            case "stdio":
                if not server.stdio.command or not server.stdio.command[0]:
                    checks.add(f"{path}.stdio.command", "must name a program")
                _check_variables(checks, f"{path}.stdio.env", server.stdio.env.items())
            case "http":
                if not server.http.url.startswith(("http://", "https://")):
                    checks.add(f"{path}.http.url", "must start with http:// or https://")
            case _:
                checks.add(path, "must have stdio or http set")


def _check_sandbox(checks: Violations, sandbox: sandbox_pb2.SandboxSpec, known: Known) -> None:
    if sandbox.provider and sandbox.provider not in known.providers:
        text = f"{sandbox.provider!r} is not switched on; on are {', '.join(sorted(known.providers))}"
        checks.add("spec.sandbox.provider", text, reason="UNKNOWN_PROVIDER")
    if sandbox.agent:
        checks.add("spec.sandbox.agent", "must be empty: it follows from spec.agent")
    if sandbox.secrets:
        checks.add("spec.sandbox.secrets", "must be empty: they follow from spec.credentials")
    if sandbox.snapshot and sandbox.image:
        checks.add("spec.sandbox.image", "must be empty together with snapshot")
    _check_variables(checks, "spec.sandbox.env", sandbox.env.items())
    _check_enum(checks, "spec.sandbox.network.mode", sandbox_pb2.NetworkMode, sandbox.network.mode)
    for index, address in enumerate(sandbox.network.allow):
        try:
            ipaddress.ip_network(address.strip(), strict=False)
        except ValueError:
            checks.add(f"spec.sandbox.network.allow[{index}]", "must be an address in CIDR form")


def _check_variables(checks: Violations, path: str, variables: Iterable[tuple[str, str]]) -> None:
    for name, value in sorted(variables):
        if not _VARIABLE.fullmatch(name):
            checks.add(path, f"{name!r} is no name of an environment variable")
        _check_text(checks, f"{path}[{name}]", value, 128 * 1024)


def _check_enum(checks: Violations, field: str, kind: object, value: int) -> None:
    if value not in kind.values():  # type: ignore[attr-defined]
        checks.add(field, "is not a value that this version knows")


def check_transcript(expected: sessions.ExpectedTranscript) -> None:
    """What a caller believes the conversation to be."""
    if len(expected.entries) > MAX_TRANSCRIPT_ENTRIES:
        raise invalid("expected_transcript.entries", f"must have at most {MAX_TRANSCRIPT_ENTRIES} entries")
    checks = Violations()
    for index, entry in enumerate(expected.entries):
        if entry.WhichOneof("entry") is None:
            checks.add(f"expected_transcript.entries[{index}]", "must be a user_message or a tool_call_id")
        elif expected.tail_only and (index == 0) != entry.HasField("user_message"):
            text = "must be a user_message if it is the first one, and only then: tail_only begins with the last one"
            checks.add(f"expected_transcript.entries[{index}]", text)
    checks.raise_if_any()


def on_busy_of(value: sessions.OnBusy.ValueType) -> OnBusy:
    """What the sender of an input wants when an execution is under way."""
    match value:
        case sessions.ON_BUSY_UNSPECIFIED | sessions.ON_BUSY_QUEUE:
            return OnBusy.QUEUE
        case sessions.ON_BUSY_REJECT:
            return OnBusy.REJECT
        case sessions.ON_BUSY_STEER:
            return OnBusy.STEER
        case _:
            raise invalid("on_busy", "is not a value that this version knows")


def answers_of(answers: Sequence[sessions.InteractionAnswer]) -> list[AnswerRow]:
    """Answers of people, as they are stored; whether each fits what was asked is seen later."""
    if not 1 <= len(answers) <= MAX_ANSWERS:
        raise invalid("answers", f"must have 1 to {MAX_ANSWERS} answers, it has {len(answers)}")
    checks, found = Violations(), dict[str, AnswerRow]()
    for index, answer in enumerate(answers):
        path = f"answers[{index}]"
        interaction_id = checks.take(fields.uuid_text, f"{path}.interaction_id", answer.interaction_id)
        if interaction_id in found:
            checks.add(f"{path}.interaction_id", "must be named once")
        if answer.decision not in _DECISIONS:
            checks.add(f"{path}.decision", "is not a value that this version knows")
        if answer.answer_json:
            _check_text(checks, f"{path}.answer_json", answer.answer_json, MAX_ANSWER_BYTES)
            if not is_json(answer.answer_json):
                checks.add(f"{path}.answer_json", "must be JSON")
        found[interaction_id] = AnswerRow(interaction_id, _DECISIONS.get(answer.decision), answer.answer_json or None)
    checks.raise_if_any()
    return list(found.values())


def name_of_caller(given: str) -> str:
    """Who answers: as the caller says, else the name of its token."""
    fields.length("answered_by", given, maximum=MAX_NAME_BYTES)
    if "\0" in given:
        raise invalid("answered_by", "must not hold NUL characters")
    return given or current_caller().name


def steers_of(request: calls.SendInputRequest) -> str:
    """Which execution an input that steers is to stop; empty where that is whichever runs."""
    if not request.steer_execution_id:
        return ""
    if request.on_busy != sessions.ON_BUSY_STEER:
        raise invalid("steer_execution_id", "must be empty unless on_busy is STEER")
    return fields.uuid_text("steer_execution_id", request.steer_execution_id)


def aim_of(request: calls.StopExecutionRequest) -> Aim:
    """Which execution a Stop means."""
    if request.execution_id:
        return Aim(execution_id=fields.uuid_text("execution_id", request.execution_id))
    if request.seen_epoch < 1:
        raise InvalidArgument(
            "execution_id: must be set, or seen_epoch: a Stop says which execution it can have meant",
            reason="INVALID_FIELD",
            field_violations=(
                ("execution_id", "must be set where seen_epoch is not"),
                ("seen_epoch", "must be set where execution_id is not"),
            ),
        )
    return Aim(seen_epoch=fields.number("seen_epoch", request.seen_epoch))


def page_token(value: str, *kinds: type) -> list[Any] | None:
    """The values of a token that `next_page_token` made; None for an empty one."""
    if not value:
        return None
    try:
        found: object = json.loads(base64.urlsafe_b64decode(value.encode()))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or [type(one) for one in found] != list(kinds) or not all(map(_storable, found)):
        raise invalid("page_token", "must be a next_page_token of this call, or empty")
    return found


def _storable(value: object) -> bool:
    """Whether a column can hold it; no other value was ever in a token."""
    return value.isprintable() if isinstance(value, str) else isinstance(value, int) and 0 <= value < 2**63


def next_page_token(*values: object) -> str:
    """A token for the page that begins after `values`."""
    return base64.urlsafe_b64encode(json.dumps(values, separators=(",", ":")).encode()).decode()
