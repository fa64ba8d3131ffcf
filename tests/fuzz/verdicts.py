"""What may become of a fuzzed call, and what may not. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence

import grpc
from google.protobuf.message import DecodeError, Message

from services.chassis.auth import ANY_PROJECT
from services.chassis.scopes import SCOPES, is_open
from tests.fuzz.callers import Caller
from tests.fuzz.calls import Answer
from tests.fuzz.messages import PROJECT, SESSIONS
from tests.support.rpcs import Rpc

# A status that says that nobody thought of the case.
DEFECTS = frozenset({grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.DATA_LOSS})

# What gRPC itself says, at either side, before or after any code of ours: it has no reason.
_OF_GRPC = {
    grpc.StatusCode.DEADLINE_EXCEEDED: "Deadline Exceeded|Stream removed.*",
    grpc.StatusCode.CANCELLED: "Locally cancelled by application!",
    grpc.StatusCode.RESOURCE_EXHAUSTED: ("(SERVER: )?(Received|Decompressed) message larger than max.*|"),
}

# Of the metadata of a call. Of that of an answer it would be the same text, and a defect.
_TOO_LADEN = "received metadata size exceeds"


def problem(rpc: Rpc, caller: Caller, sent: Sequence[bytes], answer: Answer, *, laden: bool = False) -> str | None:
    """What is wrong with an answer to `sent`, None when nothing is. `laden`: its metadata was much."""
    if answer.code in DEFECTS:
        return "is a status for what nobody thought of"
    if answer.code is grpc.StatusCode.OK or answer.responses:
        # A stream that ends otherwise may have answered its first request alone; of an upload the first says whose it
        # is.
        first = answer.code is not grpc.StatusCode.OK or rpc.name == "PutAttachment"
        wrong = _wrong_success(rpc, caller, sent[:1] if first else sent)
        if wrong is not None or answer.code is grpc.StatusCode.OK:
            return wrong
    if answer.reason or answer.given_up or is_open(rpc.path):
        return None
    if re.fullmatch(_OF_GRPC.get(answer.code, "(?!)"), answer.detail, re.DOTALL):
        return None
    if laden and answer.code is grpc.StatusCode.RESOURCE_EXHAUSTED and _TOO_LADEN in answer.detail:
        return None
    return "has no reason, and is none of gRPC's own"


def _wrong_success(rpc: Rpc, caller: Caller, sent: Sequence[bytes]) -> str | None:
    if is_open(rpc.path):
        return None
    if SCOPES[rpc.path] not in caller.scopes:
        return f"succeeds without the scope {SCOPES[rpc.path]}"
    if caller.project not in {ANY_PROJECT, PROJECT} and any(names_project(rpc.request, data) for data in sent):
        return f"reaches {PROJECT!r} with a token of {caller.project!r}"
    return None


def names_project(kind: type[Message], data: bytes) -> bool:
    """Whether a request is about a session of the project, or all of it."""
    try:
        request = kind.FromString(data)
    except DecodeError:
        return False
    return _names(request)


def _names(message: Message) -> bool:
    if message.DESCRIPTOR.full_name == "hearth.types.v1.SessionKey":
        return getattr(message, "project", "") == PROJECT and getattr(message, "session", "") in SESSIONS
    for field, value in message.ListFields():
        if field.name == "project" and value == PROJECT:
            return True
        parts = value if field.is_repeated else (value,)
        if any(isinstance(part, Message) and _names(part) for part in parts):
            return True
    return False
