"""Which scope each RPC needs: the table that every service's auth goes by. An RPC that is not here answers nobody."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final, Literal, get_args

Scope = Literal["read", "run", "admin", "internal"]
SCOPE_NAMES: Final[tuple[Scope, ...]] = get_args(Scope)

# Callable without a token: they tell nothing about any project.
OPEN_PREFIXES: Final = ("/grpc.health.v1.Health/", "/grpc.reflection.v1alpha.ServerReflection/")

_TABLE: dict[str, dict[Scope, str]] = {
    "hearth.session.v1.SessionService": {
        "run": (
            "SendInput StopExecution KillSession AnswerInteractions UpdateInput RemoveInput SendInputNow ResumeQueue"
            " PutAttachment PutCredential DeleteCredential"
        ),
        "read": "GetSession ListSessions GetExecution GetCommand ListInputs ListInteractions ListCredentials",
        "admin": "DeleteSession",
    },
    "hearth.history.v1.HistoryService": {
        "read": "ReadEvents StreamEvents GetSnapshot GetHeads",
        "internal": "AppendEvents AppendStream MarkIncomplete DeleteLog",
        "admin": "ListQuarantined TrimLog",
    },
    "hearth.relay.v1.RelayService": {"read": "Subscribe", "internal": "Publish"},
    "hearth.sandbox.v1.SandboxService": {
        "internal": "Acquire Release RenewClaims GetEndpoint DeleteWorkspace",
        "admin": "GetSandbox ListSandboxes DeleteSandbox GetUsage Reconcile",
    },
    "hearth.pool.v1.PoolService": {"admin": "ListEntries EvictEntry ListReplicas DrainReplica GetPoolStats"},
    "hearth.pool.v1.ReplicaService": {"internal": "Nudge"},
}


def _rows() -> Iterator[tuple[str, Scope]]:
    for service, scopes in _TABLE.items():
        for scope, methods in scopes.items():
            for method in methods.split():
                yield f"/{service}/{method}", scope


# Full method name, as gRPC gives it ("/package.Service/Method"), to the scope that its caller must hold.
SCOPES: Final[Mapping[str, Scope]] = dict(_rows())


def is_open(method: str) -> bool:
    """Whether `method` needs no token."""
    return method.startswith(OPEN_PREFIXES)
