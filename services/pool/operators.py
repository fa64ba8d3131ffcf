"""PoolService: what operators see of this replica, and what they may do to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hearth.pool.v1 import pool_service_pb2 as calls
from hearth.pool.v1 import pool_service_pb2_grpc
from hearth.sandbox.v1 import sandbox_pb2
from services.chassis import fields
from services.chassis.auth import ANY_PROJECT, current_caller, require_project
from services.chassis.errors import FailedPrecondition, NotFound
from services.chassis.interceptors import Context
from services.pool import messages, requests
from services.pool.metrics import Metrics
from services.pool.replicas import Replicas
from services.pool.requests import key_of
from services.pool.service import to_its_end
from services.pool.store import Store
from services.pool.turns.driver import Driver
from services.pool.warm.entries import Entries, EntryState

_PAGE = 100
_MOST = 1_000


class PoolService(pool_service_pb2_grpc.PoolServiceServicer):
    """What operators call."""

    def __init__(
        self,
        *,
        store: Store,
        entries: Entries,
        driver: Driver,
        replicas: Replicas,
        metrics: Metrics,
        warnings: Sequence[str] = (),
    ) -> None:
        self._store = store
        self._entries = entries
        self._driver = driver
        self._replicas = replicas
        self._metrics = metrics
        self._warnings = warnings

    async def ListEntries(self, request: calls.ListEntriesRequest, context: Context) -> calls.ListEntriesResponse:
        """Live agent sessions, least recently used first."""
        size = fields.page_size(request.page_size, default=_PAGE, maximum=_MOST)
        token = requests.page_token(request.page_token, int)
        offset = max(0, token[0]) if token is not None else 0
        project = current_caller().project
        mine = [entry for entry in self._entries.all() if project in (ANY_PROJECT, entry.key.project)]
        found = mine[offset:]
        response = calls.ListEntriesResponse(entries=[messages.entry(entry) for entry in found[:size]])
        if len(found) > size:
            response.next_page_token = requests.next_page_token(offset + size)
        return response

    async def EvictEntry(self, request: calls.EvictEntryRequest, context: Context) -> calls.EvictEntryResponse:
        """Close the idle entry of a session and stop its sandbox."""
        key = key_of(request.session)
        fields.request_id(request.request_id)
        # Readers see the ending of a turn before its agent is parked.
        await self._driver.settled(key)
        entry = self._entries.get(key)
        if entry is None:
            raise NotFound(
                "this replica keeps no agent of the session", reason="NOT_FOUND", resource=("entry", str(key), "")
            )
        if entry.state is not EntryState.IDLE and entry.closing is None:
            raise FailedPrecondition(
                "its agent is at work; evict it when its turn has ended, or stop that",
                reason="SESSION_BUSY",
                resource=("entry", str(key), ""),
            )
        await to_its_end(self._entries.close(entry, sandbox_pb2.RELEASE_REASON_CAPACITY))
        return calls.EvictEntryResponse()

    async def ListReplicas(self, request: calls.ListReplicasRequest, context: Context) -> calls.ListReplicasResponse:
        """Pool processes."""
        size = fields.page_size(request.page_size, default=_PAGE, maximum=_MOST)
        token = requests.page_token(request.page_token, str)
        after = fields.uuid_text("page_token", token[0]) if token is not None else None
        found = await self._store.replicas(after, size + 1)
        response = calls.ListReplicasResponse(replicas=[messages.replica(row) for row in found[:size]])
        if current_caller().project != ANY_PROJECT:
            for replica in response.replicas:
                replica.ClearField("driving")
                replica.ClearField("entries")
        if len(found) > size:
            response.next_page_token = requests.next_page_token(found[size - 1].holder)
        return response

    async def DrainReplica(self, request: calls.DrainReplicaRequest, context: Context) -> calls.DrainReplicaResponse:
        """Take nothing new from now on, finish what runs, let idle agents go. It concerns every project."""
        require_project(ANY_PROJECT)
        fields.request_id(request.request_id)
        holder = fields.uuid_text("holder", request.holder)
        if holder != self._replicas.holder:
            raise NotFound(
                f"this is replica {self._replicas.holder}", reason="NOT_FOUND", resource=("replica", holder, "")
            )
        self._driver.close()
        await to_its_end(self._replicas.drain())
        await to_its_end(self._entries.close_idle(sandbox_pb2.RELEASE_REASON_SHUTDOWN_IDLE))
        return calls.DrainReplicaResponse(driving=len(self._driver.driving))

    async def GetPoolStats(self, request: calls.GetPoolStatsRequest, context: Context) -> calls.GetPoolStatsResponse:
        """Counters. What a process did for all projects together is for callers of all of them."""
        project = current_caller().project
        mine = Counter(str(entry.state) for entry in self._entries.all() if project in (ANY_PROJECT, entry.key.project))
        if project != ANY_PROJECT:
            return calls.GetPoolStatsResponse(holder=self._replicas.holder, entries_by_state=mine)
        return calls.GetPoolStatsResponse(
            holder=self._replicas.holder,
            entries_by_state=mine,
            turns_by_how=self._metrics.turns_by_how,
            turns_by_outcome=self._metrics.turns_by_outcome,
            misses_by_reason=self._metrics.misses_by_reason,
            outbox_depth=await self._store.outbox_depth(),
            warnings=self._warnings,
        )
