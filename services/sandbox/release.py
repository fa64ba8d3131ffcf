"""Giving a sandbox back, and taking it away.

Release first closes every claim up to its own, then looks. Work that goes on under a closed claim finds it closed and
undoes itself; what Release sees afterwards is either settled or belongs to a newer claim.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

from services.chassis import crashpoints
from services.sandbox import problems
from services.sandbox.claims import Claim
from services.sandbox.metrics import Metrics
from services.sandbox.providers.port import Provider, ProviderError
from services.sandbox.rows import Key, Row
from services.sandbox.slots import Slots
from services.sandbox.states import Disposition, Fate, Observed, Tenure, fate
from services.sandbox.store import Store
from services.sandbox.tiers import Tier
from services.sandbox.transitions import Transitions, disposition
from services.sandbox.works import Works

logger = logging.getLogger(__name__)

crashpoint = crashpoints.declare(
    "sandbox",
    "release.claims_closed",
    "release.parked",
    "release.answering",
    "lapse.ended",
    "workspace.claims_closed",
    "workspace.sandbox_deleted",
    "workspace.deleted",
)

# Whoever works on such a one is making it for a claim.
_BEING_MADE = frozenset({Observed.CREATING, Observed.STARTING})


@dataclass(frozen=True, slots=True)
class Released:
    """What was done, and to which sandbox; empty when there was none."""

    disposition: Disposition
    sandbox_id: str = ""


class Releaser:
    """Serves Release, DeleteSandbox and DeleteWorkspace, and ends what nobody renews."""

    def __init__(
        self,
        *,
        store: Store,
        providers: Mapping[str, Provider],
        transitions: Transitions,
        slots: Slots,
        works: Works,
        tiers: Mapping[str, Tier],
        metrics: Metrics,
    ) -> None:
        self._store = store
        self._providers = providers
        self._transitions = transitions
        self._slots = slots
        self._works = works
        self._tiers = tiers
        self._metrics = metrics

    async def release(self, key: Key, claim: Claim, reason: str) -> Released:
        """`reason` is the name of a ReleaseReason without its prefix; what is not known deletes."""
        work = ("release", key, claim, reason)
        done = await self._works.join("release", work, lambda: self._release(key, claim, reason))
        self._metrics.released(reason, done.disposition)
        logger.info(
            "released",
            extra={
                "project": key.project,
                "session": key.session,
                "epoch": claim.epoch,
                "attempt": claim.attempt,
                "reason": reason,
                "disposition": done.disposition,
                "sandbox_id": done.sandbox_id,
            },
        )
        return done

    async def delete_sandbox(self, sandbox_id: str) -> Disposition:
        """Delete one sandbox whatever it is used for. Raises SANDBOX_NOT_FOUND."""
        return await self._works.join("delete", ("delete", sandbox_id), lambda: self._delete_sandbox(sandbox_id))

    async def delete_workspace(self, key: Key, claim: Claim) -> None:
        """Delete sandbox and workspace of a session. Raises FENCED while a newer claim stands, PROVIDER_UNAVAILABLE."""
        work = ("delete_workspace", key, claim)
        await self._works.join("delete workspace", work, lambda: self._delete_workspace(key, claim))

    async def lapse(self, sandbox_id: str, claim: Claim, renewals: int) -> Row | None:
        """End the tenure of a sandbox whose lease was seen to stand still at this claim and count: a parked one is
        stopped, an active one deleted. None: it was renewed, or is somebody else's.

        Also while it is being made: who works on it finds the row taken and undoes what it has in hands.
        """
        row = await self._store.get(sandbox_id)
        if row is None or row.claim != claim or row.tenure not in (Tenure.ACTIVE, Tenure.PARKED):
            return None
        if row.worker and row.observed not in _BEING_MADE:
            return None
        logger.warning(
            "nobody renews this claim",
            extra={"sandbox_id": sandbox_id, "holder": row.holder, "tenure": row.tenure, "epoch": claim.epoch},
        )
        if row.tenure is Tenure.PARKED and self._keeps_disk(row):
            ended = await self._transitions.stop(row, renewals=renewals)
        else:
            ended = await self._transitions.delete(row, renewals=renewals)
        if ended is not None and row.key is not None:
            crashpoint("lapse.ended")
            await self._store.close_claims(row.key, claim)
        return ended

    async def _release(self, key: Key, claim: Claim, reason: str) -> Released:
        await self._store.close_claims(key, claim)
        crashpoint("release.claims_closed")
        waited_for = ""
        while True:
            row = (await self._store.view(key)).row
            if row is None or row.claim > claim:
                return await self._nothing_left(waited_for)
            wanted = self._fate(row, reason)
            if row.in_transition and not (wanted is Fate.DELETE and row.observed is Observed.STARTING):
                waited_for = row.sandbox_id
                await self._transitions.wait(row)
                continue
            if row.overdue and wanted is not Fate.DELETE:
                await self._transitions.settle(row)
                continue
            done = await self._apply(row, wanted)
            if done is not None:
                crashpoint("release.answering")
                return Released(done, row.sandbox_id)

    async def _nothing_left(self, waited_for: str) -> Released:
        """Nothing to do any more; but work that undid itself for this release did what the release wanted."""
        row = await self._store.get(waited_for) if waited_for else None
        if row is not None and (row.observed is Observed.GONE or row.tenure is Tenure.ORPHAN):
            return Released(disposition(row), row.sandbox_id)
        return Released(Disposition.NOTHING)

    async def _apply(self, row: Row, wanted: Fate) -> Disposition | None:
        """One try at what is wanted; None: lost a race, look again."""
        if wanted is Fate.PARK and row.reachable:
            if row.tenure is Tenure.PARKED:
                return Disposition.PARKED
            parked = await self._slots.park(row)
            if parked is None:
                return None
            if parked.tenure is Tenure.PARKED:
                crashpoint("release.parked")
                self._works.start(
                    "refresh activity", ("refresh", row.sandbox_id), lambda: self.refresh(row.provider, row.reference)
                )
                return Disposition.PARKED
            row = parked
        if wanted is not Fate.DELETE and row.observed is Observed.STOPPED:
            return Disposition.STOPPED
        if wanted is not Fate.DELETE and row.observed is Observed.RUNNING and self._keeps_disk(row):
            ended = await self._transitions.stop(row)
        else:
            ended = await self._transitions.delete(row)
        return disposition(ended) if ended is not None else None

    async def refresh(self, provider: str, reference: str) -> None:
        """Tell the provider that a sandbox is in use; failing to costs at worst a cold start."""
        deadline = self._transitions.deadlines.stop
        try:
            await self._transitions.call(provider, deadline, lambda found: found.refresh_activity(reference))
        except ProviderError as trouble:
            logger.warning("activity not refreshed", extra={"instance": reference, "error": str(trouble)})

    async def _delete_sandbox(self, sandbox_id: str) -> Disposition:
        while True:
            row = await self._store.get(sandbox_id)
            if row is None:
                raise problems.sandbox_not_found(sandbox_id)
            if row.observed is Observed.GONE:
                return Disposition.NOTHING
            if row.in_transition and row.observed is not Observed.STARTING:
                await self._transitions.wait(row)
                continue
            ended = await self._transitions.delete(row)
            if ended is not None:
                return disposition(ended)

    async def _delete_workspace(self, key: Key, claim: Claim) -> None:
        await self._store.close_claims(key, claim)
        crashpoint("workspace.claims_closed")
        while True:
            view = await self._store.view(key)
            standing = view.standing
            if standing is not None and standing.claim > max(claim, standing.closed):
                raise problems.fenced(standing.highest)
            if view.row is None:
                break
            if view.row.in_transition and view.row.observed is not Observed.STARTING:
                await self._transitions.wait(view.row)
            else:
                await self._transitions.delete(view.row)
        crashpoint("workspace.sandbox_deleted")
        for provider in self._providers:
            try:
                await self._transitions.call(
                    provider, self._transitions.deadlines.delete, lambda found: found.delete_workspace(key)
                )
            except ProviderError as trouble:
                raise problems.provider_unavailable(trouble) from None
        crashpoint("workspace.deleted")

    def _fate(self, row: Row, reason: str) -> Fate:
        tier = self._tiers.get(row.provider)
        if tier is None:  # switched off since; what it kept is not wanted any more
            return Fate.DELETE
        return fate(reason, park_running=tier.park_running, park_stopped=tier.park_stopped)

    def _keeps_disk(self, row: Row) -> bool:
        tier = self._tiers.get(row.provider)
        return tier is not None and tier.park_stopped
