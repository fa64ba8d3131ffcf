"""Nothing is left running: leases that nobody renews end, rows and instances are compared, what differs is mended.

Two loops. Every replica watches the leases by its own clock and acts by compare-and-set on what it saw. One replica at
a time compares with the providers; that only saves work, since each mend is a compare-and-set on the row as it was
before the instances were listed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from uuid import UUID

from services.chassis.clock import Clock
from services.chassis.telemetry import span
from services.sandbox.claims import LeaseLimits, Leases, lapsed, observe
from services.sandbox.drift import Limits, Mend, compare
from services.sandbox.providers.port import Instance, InstanceNotFound, Provider, ProviderError
from services.sandbox.release import Releaser
from services.sandbox.rows import NAME_PREFIX, Row
from services.sandbox.states import Desired, Observed
from services.sandbox.store import Store
from services.sandbox.transitions import Transitions
from services.sandbox.works import Works

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class Report:
    """What one pass found: rows looked at, rows changed, leases ended, instances that no row knows, and whether those
    were too many to touch."""

    checked: int = 0
    mended: int = 0
    lapsed: int = 0
    unknown: int = 0
    refused_unknown: bool = False

    def __add__(self, other: Report) -> Report:
        return Report(
            self.checked + other.checked,
            self.mended + other.mended,
            self.lapsed + other.lapsed,
            self.unknown + other.unknown,
            self.refused_unknown or other.refused_unknown,
        )


class Reconciler:
    """See the module. Its two loops call `read_leases` and `turn` again and again."""

    def __init__(
        self,
        *,
        store: Store,
        providers: Mapping[str, Provider],
        transitions: Transitions,
        releaser: Releaser,
        works: Works,
        deployment_id: str,
        clock: Clock,
        lease: LeaseLimits,
        limits: Limits,
        keep_gone: float,
    ) -> None:
        """`keep_gone`: seconds that rows of gone sandboxes are kept."""
        self._store = store
        self._providers = providers
        self._transitions = transitions
        self._releaser = releaser
        self._works = works
        self._deployment_id = deployment_id
        self._clock = clock
        self._keep_gone = keep_gone
        self._lease = lease
        self._limits = limits
        self._leases = Leases()
        self._room = asyncio.Semaphore(_AT_ONCE)

    async def turn(self) -> None:
        """One pass, unless another replica is at it."""
        async with self._store.reconciling() as mine:
            if not mine:
                return
            with span("sandbox.reconcile"):
                report = await self.run(confirm_unknown=False)
            removed = await self._store.remove_old(self._keep_gone)
        if report.mended or report.unknown or removed:
            logger.info(
                "reconciled", extra={"mended": report.mended, "unknown": report.unknown, "rows_removed": removed}
            )

    async def run(self, *, confirm_unknown: bool) -> Report:
        """One pass over everything, also of what another replica is passing over."""
        ended = [await work for work in self._end_lapsed()]
        report = Report(lapsed=sum(1 for row in ended if isinstance(row, Row)))
        for provider in self._providers.values():
            report += await self._pass(provider, confirm_unknown=confirm_unknown)
        return report

    async def read_leases(self) -> None:
        """One reading of the leases. What lapsed is being ended when this returns; it is not waited for, so that the
        next reading does not come late."""
        # The time before the reading: what it shows was true then or later.
        now = self._clock.monotonic()
        self._leases = observe(self._leases, await self._store.leases(), now, self._lease)
        self._end_lapsed()

    def _end_lapsed(self) -> list[asyncio.Task[Any]]:
        """Start to end what lapsed, as of the last reading."""
        return [
            self._works.start(
                "lapse",
                ("lapse", sandbox_id),
                partial(self._in_room, partial(self._releaser.lapse, sandbox_id, sighting.claim, sighting.renewals)),
            )
            for sandbox_id, sighting in lapsed(self._leases, self._lease).items()
        ]

    async def _pass(self, provider: Provider, *, confirm_unknown: bool) -> Report:
        rows = await self._store.not_gone(provider.name)
        labels = {"hearth-deployment": self._deployment_id}
        deadlines = self._transitions.deadlines
        try:
            instances = await self._transitions.call(provider.name, deadlines.start, lambda found: found.list(labels))
        except ProviderError as trouble:
            logger.error("provider does not list", extra={"provider": provider.name, "error": str(trouble)})
            return Report(checked=len(rows))
        plan = compare(rows, instances, self._limits, confirmed=confirm_unknown)
        mends = [(row, what) for row, what in plan.mends if what is not Mend.NOTHING]
        changed = await asyncio.gather(*(self._in_room(partial(self._mend, row, what)) for row, what in mends))
        if plan.refused:
            logger.error(
                "suspiciously many unknown instances, leaving them; look, then reconcile with confirm_unknown",
                extra={"provider": provider.name, "unknown": len(plan.unknown), "listed": len(instances)},
            )
        else:
            await asyncio.gather(*(self._in_room(partial(self._reap, provider, found)) for found in plan.unknown))
        return Report(len(rows), sum(changed), 0, len(plan.unknown), plan.refused)

    async def _mend(self, row: Row, what: Mend) -> bool:
        """Whether the row was changed; not, when somebody else was faster or there is nothing to be done yet."""
        logger.warning("mending", extra={"sandbox_id": row.sandbox_id, "mend": what.value, "observed": row.observed})
        if what is Mend.DELETE:
            return await self._transitions.delete(row) is not None
        if what is Mend.STOP:
            return await self._transitions.stop(row) is not None
        if what is Mend.NOTE_STOPPED:
            return await self._transitions.seen(row, Observed.STOPPED) is not None
        if what is Mend.TAKE_OVER:
            return await self._take_over(row)
        return await self._look(row)

    async def _take_over(self, row: Row) -> bool:
        """Whoever worked on it is dead. Nobody asked us for a sandbox, so what runs is ended as it was meant to be; an
        Acquire that wants it has the same right and may be faster."""
        settled = await self._transitions.settle(row)
        if settled is None:
            return False
        if settled.observed in (Observed.STOPPED, Observed.GONE):
            return True
        if settled.desired is Desired.STOPPED and settled.observed is Observed.RUNNING:
            await self._transitions.stop(settled)
        else:
            await self._transitions.delete(settled)
        return True

    async def _look(self, row: Row) -> bool:
        try:
            await self._transitions.call(
                row.provider, self._transitions.deadlines.stop, lambda provider: provider.get(row.reference)
            )
        except InstanceNotFound:
            return await self._transitions.seen(row, Observed.GONE) is not None
        except ProviderError as trouble:
            logger.warning("cannot look", extra={"sandbox_id": row.sandbox_id, "error": str(trouble)})
        return False

    async def _reap(self, provider: Provider, instance: Instance) -> None:
        """Delete an instance that carries our label and that no row knows."""
        sandbox_id = _sandbox_id(instance.name)
        row = await self._store.get(sandbox_id) if sandbox_id is not None else None
        if row is not None and row.observed is not Observed.GONE:
            return  # written since the rows were read
        logger.warning("unknown instance, deleting", extra={"provider": provider.name, "instance": instance.name})
        deadline = self._transitions.deadlines.delete
        try:
            await self._transitions.call(provider.name, deadline, lambda found: found.delete(instance.provider_id))
        except ProviderError as trouble:
            logger.error("unknown instance stays", extra={"instance": instance.name, "error": str(trouble)})

    async def _in_room(self, make: Callable[[], Awaitable[_T]]) -> _T:
        async with self._room:
            return await make()


def _sandbox_id(name: str) -> str | None:
    try:
        return str(UUID(name.removeprefix(NAME_PREFIX)))
    except ValueError:
        return None
