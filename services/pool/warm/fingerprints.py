"""What a live agent session was made from, and which conversation it knows, as digests that can be compared.

Nothing secret goes in: credentials are known by name and slot.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, MutableSequence, Sequence

from google.protobuf.json_format import MessageToDict

from hearth.session.v1 import session_pb2
from hearth.types.v1 import content_pb2, event_pb2

_STRICT = b"\x00"
_TAIL = b"\x01"


@dataclasses.dataclass(frozen=True, slots=True)
class Defaults:
    """What the deployment puts in the place of what a spec leaves out."""

    agent: str
    provider: str = "local"
    permission: session_pb2.PermissionAction.ValueType = session_pb2.PERMISSION_ACTION_DENY


def config_fingerprint(spec: session_pb2.SessionSpec, defaults: Defaults) -> str:
    """Lower-case hex SHA-256 of a spec. A field left out equals its default, and the order of what has none does not
    count. Credentials go in by name and place; their values are compared apart."""
    applied = session_pb2.SessionSpec()
    applied.CopyFrom(spec)
    applied.agent = spec.agent or defaults.agent
    # Limits bound the turn, from outside; the agent never hears of them.
    applied.ClearField("limits")
    applied.permissions.default_action = spec.permissions.default_action or defaults.permission
    sandbox = applied.sandbox
    sandbox.provider = spec.sandbox.provider or defaults.provider
    for name in ("resources", "network"):
        if not getattr(sandbox, name).ByteSize():
            sandbox.ClearField(name)
    if sandbox.HasField("network"):
        addresses = sorted({address.strip() for address in spec.sandbox.network.allow})
        del sandbox.network.allow[:]
        sandbox.network.allow.extend(addresses)
    capabilities = sorted(set(spec.model_capabilities))
    del applied.model_capabilities[:]
    applied.model_capabilities.extend(capabilities)
    _sort_bindings(applied.credentials)
    for server in applied.mcp_servers:
        if server.WhichOneof("transport") is not None:
            _sort_bindings(getattr(server, server.WhichOneof("transport") or "").credentials)
    return _digest(MessageToDict(applied, preserving_proto_field_name=True)).hex()


def _sort_bindings(bindings: MutableSequence[session_pb2.CredentialBinding]) -> None:
    ordered = sorted(bindings, key=lambda binding: (binding.target, binding.credential))
    del bindings[:]
    bindings.extend(ordered)


@dataclasses.dataclass(frozen=True, slots=True)
class UserMessage:
    """A message of the user, as far as it counts for the identity of a conversation."""

    text: str
    attachment_ids: Sequence[str] = ()
    media_digests: Sequence[str] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class ToolCall:
    """A tool call, known by its id."""

    tool_call_id: str


Entry = UserMessage | ToolCall


def conversation(events: Iterable[event_pb2.Event]) -> list[Entry]:
    """What counts of a log, in its order."""
    entries: list[Entry] = []
    for event in events:
        if event.HasField("tool_completed"):
            entries.append(ToolCall(event.tool_completed.tool_call_id))
        elif event.message_completed.role == content_pb2.ROLE_USER:
            entries.append(user_message(event.message_completed.content))
    return entries


def user_message(content: Iterable[content_pb2.ContentPart]) -> UserMessage:
    """What counts of the content of a message."""
    texts, attachments, media = [], [], []
    for part in content:
        match part.WhichOneof("part"):
            case "text":
                texts.append(part.text.text)
            case "attachment":
                attachments.append(part.attachment.attachment_id)
            case "inline_media":
                inline = part.inline_media
                media.append(hashlib.sha256(inline.media_type.encode() + b"\0" + inline.data).hexdigest())
    return UserMessage("".join(texts), tuple(attachments), tuple(media))


def expectation(expected: session_pb2.ExpectedTranscript) -> bytes:
    """What a caller believes a conversation to be, in 33 bytes: how much of it, then the digest.

    Entries that hold one message of the user, as their first, are taken for the end of a conversation: a caller that
    keeps only its last turn need not say so.
    """
    entries: list[Entry] = []
    for entry in expected.entries:
        if entry.HasField("user_message"):
            said = entry.user_message
            entries.append(UserMessage(said.text, tuple(said.attachment_ids), tuple(said.media_digests)))
        else:
            entries.append(ToolCall(entry.tool_call_id))
    users = sum(isinstance(entry, UserMessage) for entry in entries)
    tail = expected.tail_only or (users == 1 and isinstance(entries[0], UserMessage))
    return (_TAIL if tail else _STRICT) + _fingerprint(entries)


def wants_tail(expected: bytes) -> bool:
    """Whether an `expectation` is compared with the end of a conversation only."""
    return expected[:1] == _TAIL


def meets(entries: Sequence[Entry], expected: bytes) -> bool:
    """Whether a conversation is the one of an `expectation`."""
    compared = _tail(entries) if wants_tail(expected) else entries
    return _fingerprint(compared) == expected[1:]


def _tail(entries: Sequence[Entry]) -> Sequence[Entry]:
    """From the last message of the user on; all of it when there is none."""
    for index in range(len(entries) - 1, -1, -1):
        if isinstance(entries[index], UserMessage):
            return entries[index:]
    return entries


def _fingerprint(entries: Iterable[Entry]) -> bytes:
    users, tools = [], dict[str, None]()
    for entry in entries:
        if isinstance(entry, UserMessage):
            users.append([entry.text, list(entry.attachment_ids), list(entry.media_digests)])
        else:
            tools[entry.tool_call_id] = None
    return _digest({"users": users, "tools": list(tools)})


def _digest(content: object) -> bytes:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode()).digest()
