"""What operators do with a deployment: `client.admin`. Its calls need the scope `admin`, unless they say otherwise."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import AsyncIterator

from hearth.errors import answered
from hearth.history.v1 import history_pb2, history_service_pb2, history_service_pb2_grpc
from hearth.paging import CALL_SECONDS, pages
from hearth.pool.v1 import pool_pb2, pool_service_pb2, pool_service_pb2_grpc
from hearth.sandbox.v1 import sandbox_pb2, sandbox_service_pb2, sandbox_service_pb2_grpc
from hearth.session.v1 import session_pb2 as control_pb2
from hearth.session.v1 import session_service_pb2, session_service_pb2_grpc
from hearth.types.v1 import session_pb2


class Admin:
    """The operators' half of a client. Every method raises `hearth.errors.CallError`."""

    def __init__(
        self,
        sessions: session_service_pb2_grpc.SessionServiceAsyncStub,
        pools: pool_service_pb2_grpc.PoolServiceAsyncStub,
        histories: history_service_pb2_grpc.HistoryServiceAsyncStub,
        sandboxes: sandbox_service_pb2_grpc.SandboxServiceAsyncStub,
    ) -> None:
        self._sessions = sessions
        self._pools = pools
        self._histories = histories
        self._sandboxes = sandboxes

    async def delete_session(self, key: session_pb2.SessionKey, *, request_id: str = "") -> None:
        """Delete sandbox, workspace and log of a session. What is left is a mark that it was deleted."""
        request = session_service_pb2.DeleteSessionRequest(session=key, request_id=request_id or _new())
        await answered(self._sessions.DeleteSession(request, timeout=2 * CALL_SECONDS))

    async def put_credential(
        self,
        project: str,
        name: str,
        value: str,
        *,
        expires_at: datetime.datetime | None = None,
        request_id: str = "",
    ) -> control_pb2.Credential:
        """Store a secret under a name, or renew it; `expires_at` is aware. Needs the scope `run`."""
        request = session_service_pb2.PutCredentialRequest(
            project=project, request_id=request_id or _new(), name=name, value=value
        )
        if expires_at is not None:
            request.expires_at.FromDatetime(expires_at)
        return (await answered(self._sessions.PutCredential(request, timeout=CALL_SECONDS))).credential

    async def delete_credential(self, project: str, name: str, *, request_id: str = "") -> None:
        """Delete a secret. Needs the scope `run`."""
        request = session_service_pb2.DeleteCredentialRequest(
            project=project, request_id=request_id or _new(), name=name
        )
        await answered(self._sessions.DeleteCredential(request, timeout=CALL_SECONDS))

    async def credentials(self, project: str) -> AsyncIterator[control_pb2.Credential]:
        """Names of the secrets of a project, never their values. Needs the scope `read`."""
        request = session_service_pb2.ListCredentialsRequest(project=project)
        async for page in pages(self._sessions.ListCredentials, request):
            for found in page.credentials:
                yield found

    async def entries(self) -> AsyncIterator[pool_pb2.Entry]:
        """The agent sessions that the answering replica of the pool keeps."""
        async for page in pages(self._pools.ListEntries, pool_service_pb2.ListEntriesRequest()):
            for found in page.entries:
                yield found

    async def evict(self, key: session_pb2.SessionKey, *, request_id: str = "") -> None:
        """Close the kept agent session of an idle session."""
        request = pool_service_pb2.EvictEntryRequest(session=key, request_id=request_id or _new())
        await answered(self._pools.EvictEntry(request, timeout=CALL_SECONDS))

    async def replicas(self) -> AsyncIterator[pool_pb2.Replica]:
        """The replicas of the pool."""
        async for page in pages(self._pools.ListReplicas, pool_service_pb2.ListReplicasRequest()):
            for found in page.replicas:
                yield found

    async def drain(self, holder: str, *, request_id: str = "") -> int:
        """Have a replica start nothing new; how many turns it still drives."""
        request = pool_service_pb2.DrainReplicaRequest(holder=holder, request_id=request_id or _new())
        return (await answered(self._pools.DrainReplica(request, timeout=CALL_SECONDS))).driving

    async def stats(self) -> pool_service_pb2.GetPoolStatsResponse:
        """Counters of the answering replica of the pool."""
        return await answered(self._pools.GetPoolStats(pool_service_pb2.GetPoolStatsRequest(), timeout=CALL_SECONDS))

    async def sandboxes(self, project: str = "", session: str = "") -> AsyncIterator[sandbox_pb2.Sandbox]:
        """Sandboxes that are there: of a session, of a project, or all."""
        request = sandbox_service_pb2.ListSandboxesRequest(project=project, session=session)
        async for page in pages(self._sandboxes.ListSandboxes, request):
            for found in page.sandboxes:
                yield found

    async def delete_sandbox(self, sandbox_id: str) -> sandbox_pb2.Disposition.ValueType:
        """Delete a sandbox that nobody holds; what became of it."""
        request = sandbox_service_pb2.DeleteSandboxRequest(sandbox_id=sandbox_id)
        return (await answered(self._sandboxes.DeleteSandbox(request, timeout=2 * CALL_SECONDS))).disposition

    async def usage(self, project: str = "") -> sandbox_service_pb2.GetUsageResponse:
        """What sandboxes run and cost."""
        request = sandbox_service_pb2.GetUsageRequest(project=project)
        return await answered(self._sandboxes.GetUsage(request, timeout=CALL_SECONDS))

    async def reconcile(self, *, confirm_unknown: bool = False) -> sandbox_service_pb2.ReconcileResponse:
        """Compare the records with what the provider has, now. `confirm_unknown` deletes what no record knows."""
        request = sandbox_service_pb2.ReconcileRequest(confirm_unknown=confirm_unknown)
        return await answered(self._sandboxes.Reconcile(request, timeout=4 * CALL_SECONDS))

    async def quarantined(self, key: session_pb2.SessionKey) -> AsyncIterator[history_pb2.QuarantinedEvent]:
        """Events that were kept out of the log, with the reason of each."""
        request = history_service_pb2.ListQuarantinedRequest(session=key)
        async for page in pages(self._histories.ListQuarantined, request):
            for found in page.events:
                yield found

    async def trim(self, key: session_pb2.SessionKey, through: int) -> history_pb2.Bounds:
        """Forget the events up to a sequence; the bounds of what is kept."""
        request = history_service_pb2.TrimLogRequest(session=key, through=through)
        return (await answered(self._histories.TrimLog(request, timeout=4 * CALL_SECONDS))).bounds


def _new() -> str:
    return str(uuid.uuid4())
