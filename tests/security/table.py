"""Every RPC, a request for it in some project, and what becomes of it for whom.

A row is a request that is right as far as rights go. `other` is the reason that a token of another project gets, or OK
where the answer then tells nothing of a project. `right` is what a token with the right project and scope gets here,
where nothing that the requests name exists.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

ID = "11111111-1111-4111-8111-111111111111"
DENIED = "PROJECT_DENIED"

Fields = Mapping[str, Any]


def _session(project: str, **more: Any) -> Fields:
    return {"session": {"project": project, "session": "s"}, **more}


def _asked(**more: Any) -> Callable[[str], Fields]:
    return lambda project: _session(project, request_id="r", **more)


def _of_session(**more: Any) -> Callable[[str], Fields]:
    return lambda project: _session(project, **more)


def _of_project(**more: Any) -> Callable[[str], Fields]:
    return lambda project: {"project": project, **more}


def _of_none(**more: Any) -> Callable[[str], Fields]:
    return lambda _: more


@dataclass(frozen=True, slots=True)
class Row:
    """One RPC. `everywhere`: only a token of all projects has the right to it."""

    request: Callable[[str], Fields]
    right: str
    other: str = DENIED
    everywhere: bool = False


_CLAIM = {"epoch": 1, "attempt": 1}

_SESSION = {
    "SendInput": Row(_asked(content=[{"text": {"text": "hello"}}], spec={"agent": "none-such"}), "UNKNOWN_AGENT"),
    "StopExecution": Row(_asked(execution_id=ID), "SESSION_NOT_FOUND"),
    "KillSession": Row(_asked(), "SESSION_NOT_FOUND"),
    "AnswerInteractions": Row(_asked(answers=[{"interaction_id": ID}]), "SESSION_NOT_FOUND"),
    "UpdateInput": Row(_asked(input_id=ID, content=[{"text": {"text": "hello"}}]), "SESSION_NOT_FOUND"),
    "RemoveInput": Row(_asked(input_id=ID), "SESSION_NOT_FOUND"),
    "SendInputNow": Row(_asked(input_id=ID), "SESSION_NOT_FOUND"),
    "ResumeQueue": Row(_asked(), "SESSION_NOT_FOUND"),
    "PutAttachment": Row(lambda project: {"description": _session(project, request_id="r")}, "INVALID_FIELD"),
    "PutCredential": Row(_of_project(request_id="r", name="KEY", value="v"), "OK"),
    "DeleteCredential": Row(_of_project(request_id="d", name="NONE"), "OK"),
    "GetSession": Row(_of_session(), "SESSION_NOT_FOUND"),
    "ListSessions": Row(_of_project(), "OK"),
    "GetExecution": Row(_of_session(execution_id=ID), "SESSION_NOT_FOUND"),
    "GetCommand": Row(_of_session(command_id=ID), "SESSION_NOT_FOUND"),
    "ListInputs": Row(_of_session(), "SESSION_NOT_FOUND"),
    "ListInteractions": Row(_of_session(), "SESSION_NOT_FOUND"),
    "ListCredentials": Row(_of_project(), "OK"),
    "DeleteSession": Row(_asked(), "SESSION_NOT_FOUND"),
}
_HISTORY = {
    "AppendEvents": Row(lambda project: {"sets": [_session(project, events=[{}])]}, "OK"),
    "AppendStream": Row(lambda project: {"number": 1, "sets": [_session(project, events=[{}])]}, "OK"),
    "ReadEvents": Row(_of_session(), "OK"),
    "StreamEvents": Row(_of_session(), "OK"),
    "GetSnapshot": Row(_of_session(), "OK"),
    "GetHeads": Row(lambda project: {"sessions": [_session(project)["session"]]}, "OK"),
    "MarkIncomplete": Row(_of_session(execution_id=ID, reason="LOST"), "EXECUTION_NOT_FOUND"),
    "ListQuarantined": Row(_of_session(), "OK"),
    "TrimLog": Row(_of_session(through=1), "CURSOR_AHEAD"),
    # A session of its own: a log that is deleted stays so, for all others here.
    "DeleteLog": Row(lambda project: {"session": {"project": project, "session": "deleted"}}, "OK"),
}
_RELAY = {
    "Publish": Row(lambda project: {"number": 1, "batches": [_session(project)]}, "OK"),
    "Subscribe": Row(_of_session(tail=True), "OK"),
}
_SANDBOX = {
    "Acquire": Row(_of_session(), "INVALID_FIELD"),
    "Release": Row(_of_session(claim=_CLAIM), "OK"),
    "RenewClaims": Row(
        lambda project: {"holder": ID, "renewals": [_session(project, claim=_CLAIM, tenure="TENURE_ACTIVE")]},
        "OK",
    ),
    "GetEndpoint": Row(_of_session(claim=_CLAIM), "SANDBOX_NOT_FOUND"),
    "DeleteWorkspace": Row(_of_session(claim=_CLAIM), "OK"),
    # Whose it is would tell that it exists.
    "GetSandbox": Row(_of_none(sandbox_id=ID), "SANDBOX_NOT_FOUND", other="SANDBOX_NOT_FOUND"),
    "DeleteSandbox": Row(_of_none(sandbox_id=ID), "SANDBOX_NOT_FOUND", other="SANDBOX_NOT_FOUND"),
    "ListSandboxes": Row(_of_project(), "OK"),
    "GetUsage": Row(_of_project(), "OK"),
    "Reconcile": Row(_of_none(), "OK", everywhere=True),
}
_POOL = {
    # These tell each caller of its own project only, or of processes.
    "ListEntries": Row(_of_none(), "OK", other="OK"),
    "ListReplicas": Row(_of_none(), "OK", other="OK"),
    "GetPoolStats": Row(_of_none(), "OK", other="OK"),
    "EvictEntry": Row(_asked(), "NOT_FOUND"),
    "DrainReplica": Row(_of_none(holder=ID, request_id="r"), "NOT_FOUND", everywhere=True),
}

TABLE: Mapping[str, Row] = {
    f"/hearth.{service}/{name}": row
    for service, rows in {
        "session.v1.SessionService": _SESSION,
        "history.v1.HistoryService": _HISTORY,
        "relay.v1.RelayService": _RELAY,
        "sandbox.v1.SandboxService": _SANDBOX,
        "pool.v1.PoolService": _POOL,
        "pool.v1.ReplicaService": {"Nudge": Row(_of_session(epoch=1, holder=ID), "OK")},
    }.items()
    for name, row in rows.items()
}
