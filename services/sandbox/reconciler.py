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

from services.chassis import crashpoints
from services.chassis.clock import Clock, Ids
from services.chassis.telemetry import span
from services.sandbox.claims import LeaseLimits, Leases, Sighting, lapsed, observe
from services.sandbox.drift import Limits, Mend, Plan, compare, proven, strangers
from services.sandbox.metrics import Metrics
from services.sandbox.providers.port import Instance, InstanceNotFound, Provider, ProviderError
from services.sandbox.release import Releaser
from services.sandbox.rows import NAME_PREFIX, Key, Row
from services.sandbox.slots import Slots
from services.sandbox.states import Desired, Observed, Tenure
from services.sandbox.store import Store
from services.sandbox.transitions import Transitions
from services.sandbox.works import Works

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
# Works at one time: of mending, and of ending what lapsed, which is many at once when a pool dies.
_AT_ONCE = 8
_LAPSES_AT_ONCE = 32
# After so many turns in a row in which another replica is at it, this one does not believe that it still works.
_MOST_REFUSALS = 2
# Names of unknown instances that are told, of each provider: more would not help a person.
_MOST_NAMES = 100


crashpoint = crashpoints.declare(
    "sandbox",
    "reconcile.rows_read",
    "reconcile.listed",
    "reconcile.breaker_tripped",
    "reconcile.orphan_written",
    "reconcile.seen_gone",
    "reconcile.settled",
)


@dataclass(frozen=True, slots=True)
class Report:
    """What one pass found: rows looked at, rows changed, leases ended, instances that no row knows (their number, the
    names of the first of them) and whether those were too many to touch; providers that did not answer."""

    checked: int = 0
    mended: int = 0
    lapsed: int = 0
    unknown: int = 0
    refused_unknown: bool = False
    unknown_names: tuple[str, ...] = ()
    unanswered: tuple[str, ...] = ()

    def __add__(self, other: Report) -> Report:
        return Report(
            self.checked + other.checked,
            self.mended + other.mended,
            self.lapsed + other.lapsed,
            self.unknown + other.unknown,
            self.refused_unknown or other.refused_unknown,
            self.unknown_names + other.unknown_names,
            self.unanswered + other.unanswered,
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
        slots: Slots,
        works: Works,
        deployment_id: str,
        clock: Clock,
        ids: Ids,
        lease: LeaseLimits,
        limits: Limits,
        keep_gone: float,
        metrics: Metrics,
    ) -> None:
        """`keep_gone`: seconds that rows of gone sandboxes are kept."""
        self._store = store
        self._providers = providers
        self._transitions = transitions
        self._releaser = releaser
        self._slots = slots
        self._works = works
        self._deployment_id = deployment_id
        self._clock = clock
        self._ids = ids
        self._keep_gone = keep_gone
        self._metrics = metrics
        self._lease = lease
        self._limits = limits
        self._leases = Leases()
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._room_of_lapses = asyncio.Semaphore(_LAPSES_AT_ONCE)
        self._refusals = 0

    async def turn(self) -> None:
        """One pass, unless another replica is at it. One that was frozen at it must not keep the others from it."""
        async with self._store.reconciling() as mine:
            self._refusals = 0 if mine else self._refusals + 1
            if not mine and self._refusals < _MOST_REFUSALS:
                return
            self._refusals = 0
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
        self._metrics.reconciled(report)
        return report

    async def read_leases(self) -> list[asyncio.Task[Any]]:
        """One reading of the leases. What lapsed is being ended when this returns; it is not waited for, so that the
        next reading does not come late. Returns the works that end it."""
        # The time before the reading: what it shows was true then or later.
        now = self._clock.monotonic()
        self._leases = observe(self._leases, await self._store.leases(), now, self._lease)
        return self._end_lapsed()

    def _end_lapsed(self) -> list[asyncio.Task[Any]]:
        """Start to end what lapsed, as of the last reading."""
        return [
            self._works.start(
                "lapse",
                ("lapse", sandbox_id),
                partial(self._lapse, sandbox_id, sighting),
            )
            for sandbox_id, sighting in lapsed(self._leases, self._lease).items()
        ]

    async def _lapse(self, sandbox_id: str, sighting: Sighting) -> Row | None:
        async with self._room_of_lapses:
            return await self._releaser.lapse(sandbox_id, sighting.claim, sighting.renewals)

    async def _pass(self, provider: Provider, *, confirm_unknown: bool) -> Report:
        trimmed = await self._slots.trim(provider.name)
        rows = await self._store.not_gone(provider.name)
        crashpoint("reconcile.rows_read")
        labels = {"hearth-deployment": self._deployment_id}
        deadlines = self._transitions.deadlines
        try:
            instances = await self._transitions.call(provider.name, deadlines.start, lambda found: found.list(labels))
        except ProviderError as trouble:
            logger.error("provider does not list", extra={"provider": provider.name, "error": str(trouble)})
            return Report(checked=len(rows), mended=trimmed, unanswered=(provider.name,))
        crashpoint("reconcile.listed")
        plan = compare(
            rows,
            instances,
            self._limits,
            gone=await self._gone(strangers(rows, instances)),
            tripped=await self._store.breaker(provider.name) is not None,
            confirmed=confirm_unknown,
        )
        mends = [(row, what) for row, what in plan.mends if what is not Mend.NOTHING]
        changed = await asyncio.gather(*(self._in_room(partial(self._mend, row, what)) for row, what in mends))
        await self._break(provider, plan)
        reaped = plan.late if plan.refused else (*plan.late, *plan.unknown)
        await asyncio.gather(*(self._in_room(partial(self._reap, provider, found)) for found in reaped))
        names = tuple(instance.name for instance in plan.unknown[:_MOST_NAMES])
        return Report(len(rows), trimmed + sum(changed), 0, len(plan.unknown), plan.refused, names)

    async def _gone(self, instances: list[Instance]) -> set[str]:
        """The names of those whose row was seen gone."""
        names = {found: instance.name for instance in instances if (found := _sandbox_id(instance.name)) is not None}
        return {names[sandbox_id] for sandbox_id in await self._store.gone(list(names))} if names else set()

    async def _break(self, provider: Provider, plan: Plan) -> None:
        """Trip the breaker, or reset it when a person has looked or nothing is unknown any more."""
        if not plan.refused:
            await self._store.reset_breaker(provider.name)
            return
        logger.error(
            "suspiciously many unknown instances, leaving them; look, then reconcile with confirm_unknown",
            extra={"provider": provider.name, "unknown": len(plan.unknown)},
        )
        await self._store.trip_breaker(provider.name, len(plan.unknown))
        crashpoint("reconcile.breaker_tripped")

    async def _mend(self, row: Row, what: Mend) -> bool:
        """Whether the row was changed; not, when somebody else was faster or there is nothing to be done yet."""
        if what is Mend.NOTHING:
            return False
        logger.warning("mending", extra={"sandbox_id": row.sandbox_id, "mend": what.value, "observed": row.observed})
        if what is Mend.DELETE:
            return await self._transitions.delete(row) is not None
        if what is Mend.STOP:
            return await self._transitions.stop(row) is not None
        if what is Mend.NOTE_STOPPED:
            return await self._transitions.seen(row, Observed.STOPPED) is not None
        if what is Mend.TAKE_OVER:
            return await self._take_over(row)
        return await self._look(row, doubted=what is Mend.DOUBT)

    async def _take_over(self, row: Row) -> bool:
        """Whoever worked on it is dead. Nobody asked us for a sandbox, so what runs is ended as it was meant to be; an
        Acquire that wants it has the same right and may be faster."""
        settled = await self._transitions.settle(row)
        if settled is None:
            return False
        crashpoint("reconcile.settled")
        if settled.observed in (Observed.STOPPED, Observed.GONE):
            return True
        if settled.desired is Desired.STOPPED and settled.observed is Observed.RUNNING:
            await self._transitions.stop(settled)
        else:
            await self._transitions.delete(settled)
        return True

    async def _look(self, row: Row, *, doubted: bool) -> bool:
        """Ask for the instance alone. Of one that was only not listed it matters whether it is there."""
        try:
            instance = await self._transitions.call(
                row.provider, self._transitions.deadlines.stop, lambda provider: provider.get(row.reference)
            )
        except InstanceNotFound:
            crashpoint("reconcile.seen_gone")
            return await self._transitions.seen(row, Observed.GONE) is not None
        except ProviderError as trouble:
            logger.warning("cannot look", extra={"sandbox_id": row.sandbox_id, "error": str(trouble)})
            return False
        return await self._mend(row, proven(row, instance)) if doubted else False

    async def _reap(self, provider: Provider, instance: Instance) -> None:
        """Delete an instance that carries our label and has no living row. It is written down first, so that it is
        counted, and tried again, until it is seen gone."""
        sandbox_id = _sandbox_id(instance.name)
        row = await self._store.get(sandbox_id) if sandbox_id is not None else None
        if row is not None and row.observed is not Observed.GONE:
            return  # written since the rows were read
        project, session = (instance.labels.get(label, "") for label in ("hearth-project", "hearth-session"))
        orphan = await self._store.insert_orphan(
            Row(
                # A row that was seen gone stays so; what came after it has a row of its own.
                sandbox_id=sandbox_id if sandbox_id is not None and row is None else self._ids.new(),
                key=Key(project, session) if project and session else None,
                provider=provider.name,
                provider_id=instance.provider_id,
                agent="",
                fingerprint="",
                daemon_fingerprint="",
                desired=Desired.GONE,
                observed=Observed.UNKNOWN,
                tenure=Tenure.ORPHAN,
                last_error="no row knew this instance" if row is None else "it came after it was seen gone",
            )
        )
        if orphan is None:
            return
        crashpoint("reconcile.orphan_written")
        logger.warning("unknown instance, deleting", extra={"provider": provider.name, "instance": instance.name})
        await self._transitions.delete(orphan)

    async def _in_room(self, make: Callable[[], Awaitable[_T]]) -> _T:
        async with self._room:
            return await make()


def _sandbox_id(name: str) -> str | None:
    try:
        return str(UUID(name.removeprefix(NAME_PREFIX)))
    except ValueError:
        return None
