"""SandboxService: gRPC in and out."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import grpc.aio
from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from hearth.sandbox.v1 import sandbox_pb2, sandbox_service_pb2, sandbox_service_pb2_grpc
from hearth.types.v1 import session_pb2
from services.chassis import fields
from services.chassis.auth import ANY_PROJECT, current_caller, require_project
from services.chassis.errors import invalid
from services.sandbox import problems, requests, usage
from services.sandbox.acquire import Acquired, Acquirer
from services.sandbox.claims import Claim, RenewalVerdict, judge_renewal
from services.sandbox.providers.port import InstanceNotFound, Provider, ProviderError, ProviderRefused
from services.sandbox.reconciler import Reconciler
from services.sandbox.release import Releaser
from services.sandbox.rows import Row
from services.sandbox.starting import Want
from services.sandbox.states import Observed, Tenure
from services.sandbox.store import Position, Store
from services.sandbox.tiers import Tier
from services.sandbox.transitions import Transitions
from services.sandbox.works import Works

_Context = grpc.aio.ServicerContext[Any, Any]

_PAGE_DEFAULT = 100
_PAGE_MOST = 1000


class SandboxServicer(sandbox_service_pb2_grpc.SandboxServiceServicer):
    """See the contract."""

    def __init__(
        self,
        *,
        store: Store,
        providers: Mapping[str, Provider],
        default_provider: str,
        agents: Collection[str],
        tiers: Mapping[str, Tier],
        acquirer: Acquirer,
        releaser: Releaser,
        reconciler: Reconciler,
        transitions: Transitions,
        works: Works,
        activity_refresh: float,
        warnings: Sequence[str] = (),
    ) -> None:
        self._store = store
        self._providers = providers
        self._default_provider = default_provider
        self._agents = agents
        self._tiers = tiers
        self._acquirer = acquirer
        self._releaser = releaser
        self._reconciler = reconciler
        self._transitions = transitions
        self._works = works
        self._activity_refresh = activity_refresh
        self._warnings = warnings

    async def Acquire(
        self, request: sandbox_service_pb2.AcquireRequest, context: _Context
    ) -> sandbox_service_pb2.AcquireResponse:
        key = requests.read_key(request.session)
        require_project(key.project)
        claim = requests.read_claim(request.claim)
        holder = fields.uuid_text("holder", request.holder)
        spec = requests.read_spec(
            request.spec,
            default_provider=self._default_provider,
            providers=self._providers,
            agents=self._agents,
        )
        try:
            self._providers[spec.provider].check(spec)
        except ProviderRefused as refusal:
            raise problems.provider_refused(refusal, "spec") from None
        return _acquired(await self._acquirer.acquire(Want(key, claim, holder, spec)))

    async def Release(
        self, request: sandbox_service_pb2.ReleaseRequest, context: _Context
    ) -> sandbox_service_pb2.ReleaseResponse:
        key = requests.read_key(request.session)
        require_project(key.project)
        claim = requests.read_claim(request.claim, least_attempt=0)
        if request.holder:
            fields.uuid_text("holder", request.holder)
        done = await self._releaser.release(key, claim, requests.reason_name(request.reason))
        return sandbox_service_pb2.ReleaseResponse(
            disposition=sandbox_pb2.Disposition.Value(f"DISPOSITION_{done.disposition}"), sandbox_id=done.sandbox_id
        )

    async def RenewClaims(
        self, request: sandbox_service_pb2.RenewClaimsRequest, context: _Context
    ) -> sandbox_service_pb2.RenewClaimsResponse:
        holder = fields.uuid_text("holder", request.holder)
        renewals = requests.read_renewals(request)
        for project in {renewal.key.project for renewal in renewals}:
            require_project(project)
        response = sandbox_service_pb2.RenewClaimsResponse()
        if not renewals:
            return response
        found = await self._store.renew(holder, renewals, refresh_after=self._activity_refresh)
        for renewal, result in zip(renewals, found, strict=True):
            verdict = judge_renewal(result.standing, renewal.claim, renewed=result.sandbox_id is not None)
            answer = response.results.add(outcome=sandbox_pb2.RenewalOutcome.Value(f"RENEWAL_OUTCOME_{verdict.name}"))
            if verdict is RenewalVerdict.FENCED and result.standing is not None:
                answer.current.CopyFrom(_claim(result.standing.claim))
            if result.refresh:
                self._refresh(result.provider, result.provider_id)
        return response

    async def GetEndpoint(
        self, request: sandbox_service_pb2.GetEndpointRequest, context: _Context
    ) -> sandbox_service_pb2.GetEndpointResponse:
        key = requests.read_key(request.session)
        require_project(key.project)
        claim = requests.read_claim(request.claim)
        view = await self._store.view(key)
        if view.standing is not None and view.standing.claim > claim:
            raise problems.fenced(view.standing.highest)
        row = view.row
        if row is None or row.claim != claim or not row.reachable:
            raise problems.sandbox_not_found(f"under this claim of session {key.project}/{key.session}")
        try:
            address = await self._transitions.call(
                row.provider, self._transitions.deadlines.stop, lambda provider: provider.endpoint(row.reference)
            )
        except InstanceNotFound:
            raise problems.sandbox_not_found(row.sandbox_id) from None
        except ProviderError as trouble:
            raise problems.provider_unavailable(trouble) from None
        endpoint = sandbox_pb2.Endpoint(
            url=address.url, token=row.token.reveal() if row.token else "", headers=address.headers
        )
        return sandbox_service_pb2.GetEndpointResponse(sandbox_id=row.sandbox_id, endpoint=endpoint)

    async def DeleteWorkspace(
        self, request: sandbox_service_pb2.DeleteWorkspaceRequest, context: _Context
    ) -> sandbox_service_pb2.DeleteWorkspaceResponse:
        key = requests.read_key(request.session)
        require_project(key.project)
        await self._releaser.delete_workspace(key, requests.read_claim(request.claim, least_attempt=0))
        return sandbox_service_pb2.DeleteWorkspaceResponse()

    async def GetSandbox(
        self, request: sandbox_service_pb2.GetSandboxRequest, context: _Context
    ) -> sandbox_service_pb2.GetSandboxResponse:
        row = await self._visible(request.sandbox_id)
        return sandbox_service_pb2.GetSandboxResponse(sandbox=_sandbox(row))

    async def ListSandboxes(
        self, request: sandbox_service_pb2.ListSandboxesRequest, context: _Context
    ) -> sandbox_service_pb2.ListSandboxesResponse:
        project = _project_filter(request.project)
        session = None
        if request.session:
            if not request.project:
                raise invalid("project", "must be given with a session: a session id alone names nothing")
            session = fields.key_part("session", request.session)
        limit = fields.page_size(request.page_size, default=_PAGE_DEFAULT, maximum=_PAGE_MOST)
        rows = await self._store.page(
            project=project,
            session=session,
            tenure=requests.read_tenure(request.tenure),
            include_gone=request.include_gone,
            after=requests.read_page_token(request.page_token),
            limit=limit + 1,
        )
        response = sandbox_service_pb2.ListSandboxesResponse(sandboxes=[_sandbox(row) for row in rows[:limit]])
        if len(rows) > limit:
            last = rows[limit - 1]
            assert last.created_at is not None
            response.next_page_token = requests.page_token(Position(last.created_at, last.sandbox_id))
        return response

    async def DeleteSandbox(
        self, request: sandbox_service_pb2.DeleteSandboxRequest, context: _Context
    ) -> sandbox_service_pb2.DeleteSandboxResponse:
        row = await self._visible(request.sandbox_id)
        done = await self._releaser.delete_sandbox(row.sandbox_id)
        return sandbox_service_pb2.DeleteSandboxResponse(
            disposition=sandbox_pb2.Disposition.Value(f"DISPOSITION_{done}")
        )

    async def GetUsage(
        self, request: sandbox_service_pb2.GetUsageRequest, context: _Context
    ) -> sandbox_service_pb2.GetUsageResponse:
        use = await usage.read(self._store, self._tiers, _project_filter(request.project))
        response = sandbox_service_pb2.GetUsageResponse(orphans=use.orphans)
        response.as_of.FromDatetime(use.as_of)
        for tier in use.tiers:
            total = Duration()
            total.FromMicroseconds(round(tier.seconds * 1e6))
            response.tiers.add(
                provider=tier.provider,
                tier=tier.tier,
                count=tier.count,
                total=total,
                cost_micro_usd=tier.cost_micro_usd,
                micro_usd_per_hour=tier.micro_usd_per_hour,
            )
        for slot in use.slots:
            response.slots.add(
                provider=slot.provider,
                cap=slot.cap,
                used=slot.used,
                worst_micro_usd_per_hour=slot.worst_micro_usd_per_hour,
            )
        if current_caller().project == ANY_PROJECT:
            response.warnings.extend(self._warnings)
        return response

    async def Reconcile(
        self, request: sandbox_service_pb2.ReconcileRequest, context: _Context
    ) -> sandbox_service_pb2.ReconcileResponse:
        # It touches the sandboxes of every project.
        require_project(ANY_PROJECT)
        report = await self._works.join(
            "reconcile",
            ("reconcile", request.confirm_unknown),
            lambda: self._reconciler.run(confirm_unknown=request.confirm_unknown),
        )
        return sandbox_service_pb2.ReconcileResponse(
            checked=report.checked,
            mended=report.mended,
            lapsed=report.lapsed,
            unknown=report.unknown,
            refused_unknown=report.refused_unknown,
            unknown_names=report.unknown_names,
            unanswered=report.unanswered,
        )

    async def _visible(self, sandbox_id: str) -> Row:
        """The row, if it exists and the caller may know of it; else SANDBOX_NOT_FOUND."""
        row = await self._store.get(fields.uuid_text("sandbox_id", sandbox_id))
        caller = current_caller()
        if row is None or caller.project not in (ANY_PROJECT, row.key.project if row.key is not None else ""):
            raise problems.sandbox_not_found(sandbox_id)
        return row

    def _refresh(self, provider: str, reference: str) -> None:
        self._works.start(
            "refresh activity", ("refresh", reference), lambda: self._releaser.refresh(provider, reference)
        )


def _project_filter(project: str) -> str | None:
    """The project to look at: the one asked for, else the caller's own; None is all."""
    if project:
        fields.key_part("project", project)
        require_project(project)
        return project
    own = current_caller().project
    return None if own == ANY_PROJECT else own


def _acquired(done: Acquired) -> sandbox_service_pb2.AcquireResponse:
    response = sandbox_service_pb2.AcquireResponse(
        sandbox_id=done.sandbox_id,
        how=sandbox_pb2.AcquireHow.Value(f"ACQUIRE_HOW_{done.how}"),
        endpoint=sandbox_pb2.Endpoint(url=done.url, token=done.token.reveal(), headers=done.headers),
        workspace=done.workspace,
    )
    for stage in done.stages:
        response.timings.stages.add(stage=stage.name, duration_us=round(stage.seconds * 1e6))
    return response


def _claim(claim: Claim) -> sandbox_pb2.Claim:
    return sandbox_pb2.Claim(epoch=claim.epoch, attempt=claim.attempt)


def _sandbox(row: Row) -> sandbox_pb2.Sandbox:
    found = sandbox_pb2.Sandbox(
        sandbox_id=row.sandbox_id,
        provider=row.provider,
        provider_id=row.provider_id,
        agent=row.agent,
        desired=sandbox_pb2.SandboxState.Value(f"SANDBOX_STATE_{row.desired}"),
        observed=sandbox_pb2.SandboxState.Value(f"SANDBOX_STATE_{row.observed}"),
        tenure=sandbox_pb2.Tenure.Value(f"TENURE_{row.tenure}"),
        holder=row.holder or "",
        fingerprint=row.fingerprint,
        last_error=row.last_error,
    )
    if row.key is not None:
        found.session.CopyFrom(session_pb2.SessionKey(project=row.key.project, session=row.key.session))
    if row.tenure in (Tenure.ACTIVE, Tenure.PARKED) and row.observed is not Observed.GONE:
        found.claim.CopyFrom(_claim(row.claim))
    for name, moment in (("created_at", row.created_at), ("changed_at", row.changed_at)):
        if moment is not None:
            timestamp: Timestamp = getattr(found, name)
            timestamp.FromDatetime(moment)
    return found
