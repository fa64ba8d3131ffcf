"""Metrics of the sandboxes: what there is and what it costs, how it was got and given back, what had to be mended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import TYPE_CHECKING

from services.chassis import metrics
from services.chassis.metrics import LONG, Count, Of, Reading, Readings, Sizes
from services.sandbox import usage
from services.sandbox.stages import Stage
from services.sandbox.states import Disposition, How, Observed
from services.sandbox.store import Present, Store
from services.sandbox.tiers import Tier

if TYPE_CHECKING:
    from services.sandbox.reconciler import Report

_HOW = tuple(str(how).lower() for how in How)
_MICRO = 1_000_000
_SECONDS_PER_HOUR = 3600.0
# Totals look at the rows of a week.
_TOTALS_EVERY_SECONDS = 30.0
# What a pass may find.
_FINDINGS = ("mended", "lapsed", "unknown", "refused_unknown", "unanswered")

ACQUIRED = metrics.counter(
    "hearth.sandbox.acquires",
    "{call}",
    "sandboxes that were given to turns, by how: `attached` = it still ran, `restarted` = from its disk or with a new"
    " daemon, `created` = new; `failed` = none was given",
    labels={"how": (*_HOW, "failed")},
)
ACQUIRE = metrics.histogram(
    "hearth.sandbox.acquire.duration", "s", "from the question for a sandbox to it, by how", LONG, labels={"how": _HOW}
)
STAGES = metrics.histogram(
    "hearth.sandbox.stage.duration",
    "s",
    "the stages of getting a sandbox; `wait` = for other work on the same one",
    LONG,
    labels={"stage": ()},
)
RELEASED = metrics.counter(
    "hearth.sandbox.releases",
    "{call}",
    "sandboxes that were given back, by the reason and by what was done with them",
    labels={"reason": ("CLEAN_TURN",), "disposition": tuple(str(found).lower() for found in Disposition)},
)
PROVIDER_CALLS = metrics.counter(
    "hearth.sandbox.provider.calls",
    "{call}",
    "calls of a provider, by outcome: `ok`, or the kind of its error",
    labels={"provider": (), "outcome": ()},
)
FINDINGS = metrics.counter(
    "hearth.sandbox.reconcile.findings",
    "{finding}",
    "what passes over rows and instances found: `mended` rows that were not as the instance is, `lapsed` leases that"
    " were ended, `unknown` instances that no row knows, `refused_unknown` passes in which those were too many to"
    " touch, `unanswered` providers that did not list",
    labels={"finding": _FINDINGS},
)
PASSES = metrics.counter("hearth.sandbox.reconcile.passes", "{pass}", "passes of this process over rows and instances")
SANDBOXES = metrics.gauge(
    "hearth.sandbox.sandboxes",
    "{sandbox}",
    "sandboxes as they were last seen, without those that are gone",
    of=Of.DEPLOYMENT,
    labels={"provider": (), "state": tuple(str(state).lower() for state in Observed if state is not Observed.GONE)},
)
OVERDUE = metrics.gauge(
    "hearth.sandbox.overdue",
    "{sandbox}",
    "sandboxes whose work is past its deadline and that nobody has taken over yet",
    of=Of.DEPLOYMENT,
)
TIERS = metrics.gauge(
    "hearth.sandbox.tier.sandboxes",
    "{sandbox}",
    "sandboxes by what they cost: `active` in a turn, `parked` running without one, `stopped`, `orphan` = cannot be"
    " shown stopped",
    of=Of.DEPLOYMENT,
    labels={"provider": (), "tier": usage.TIERS},
)
SECONDS = metrics.counter(
    "hearth.sandbox.tier",
    "s",
    "seconds of sandboxes in each tier since the deployment began",
    of=Of.DEPLOYMENT,
    labels={"provider": (), "tier": usage.TIERS},
)
COST = metrics.counter(
    "hearth.sandbox.cost.usd",
    "{USD}",
    "cost of those seconds at the prices in the settings, in US dollars",
    of=Of.DEPLOYMENT,
    labels={"provider": (), "tier": usage.TIERS},
)
HOURLY = metrics.gauge(
    "hearth.sandbox.cost.hourly.usd",
    "{USD}",
    "what an hour of the sandboxes that there are costs, in US dollars",
    of=Of.DEPLOYMENT,
    labels={"provider": (), "tier": usage.TIERS},
)
SLOTS = metrics.gauge(
    "hearth.sandbox.slots",
    "{slot}",
    "warm slots, `used` and `free`; what is parked running has one",
    of=Of.DEPLOYMENT,
    labels={"provider": (), "state": ("used", "free")},
)
WARM_CAP = metrics.gauge(
    "hearth.sandbox.warm.cap",
    "{sandbox}",
    "how many sandboxes may be kept running without a turn, by the settings",
    of=Of.DEPLOYMENT,
    labels={"provider": ()},
)
BREAKER = metrics.gauge(
    "hearth.sandbox.reconcile.unknown",
    "{sandbox}",
    "instances that no row knows, where they are so many that none is touched until a person has looked",
    of=Of.DEPLOYMENT,
    labels={"provider": ()},
)


class Metrics:
    """The instruments of one process."""

    def __init__(self) -> None:
        self._acquired = Count(ACQUIRED)
        self._acquire = Sizes(ACQUIRE)
        self._stages = Sizes(STAGES)
        self._released = Count(RELEASED)
        self._calls = Count(PROVIDER_CALLS)
        self._findings = Count(FINDINGS)
        self._passes = Count(PASSES)

    def acquired(self, how: How, seconds: float, stages: Sequence[Stage]) -> None:
        """A sandbox was given to a turn."""
        name = str(how).lower()
        self._acquired.add(1, name)
        self._acquire.record(seconds, name)
        for stage in stages:
            self._stages.record(stage.seconds, stage.name)

    def not_acquired(self) -> None:
        """A turn got no sandbox."""
        self._acquired.add(1, "failed")

    def released(self, reason: str, disposition: Disposition) -> None:
        """A sandbox was given back; `reason` is empty for one that is not known."""
        self._released.add(1, reason or "UNKNOWN", str(disposition).lower())

    def called(self, provider: str, outcome: str) -> None:
        """A call of a provider has ended."""
        self._calls.add(1, provider, outcome)

    def reconciled(self, report: Report) -> None:
        """A pass has ended."""
        self._passes.add(1)
        for finding in _FINDINGS:
            found = getattr(report, finding)
            self._findings.add(len(found) if isinstance(found, tuple) else int(found), finding)


def watch(readings: Readings, store: Store, tiers: Mapping[str, Tier]) -> None:
    """Show what there is, by the rows."""

    async def present() -> Reading:
        rows, used, unknown = await store.present(), await store.slots_used(), await store.breakers()
        # Nobody passes over a provider that was switched off: its breaker would stay as it is for ever.
        return {**_present(rows, used, tiers), BREAKER: {name: unknown.get(name, 0) for name in tiers}}

    async def totals() -> Reading:
        uses = usage.tier_uses(await store.usage(None), tiers)
        return {
            SECONDS: {(use.provider, use.tier): use.seconds for use in uses},
            COST: {(use.provider, use.tier): use.cost_micro_usd / _MICRO for use in uses},
        }

    readings.watch(present, SANDBOXES, OVERDUE, TIERS, HOURLY, SLOTS, WARM_CAP, BREAKER)
    readings.watch(totals, SECONDS, COST, every=_TOTALS_EVERY_SECONDS)


def _present(rows: Sequence[Present], used: Mapping[str, int], tiers: Mapping[str, Tier]) -> Reading:
    """The numbers of what there is. Every provider that is on has all of its series, so that an absent one is news."""
    providers = [*tiers, *sorted({row.provider for row in rows} - set(tiers))]
    states = dict.fromkeys(product(providers, SANDBOXES.labels["state"]), 0)
    counts = dict.fromkeys(product(providers, usage.TIERS), 0)
    for row in rows:
        states[row.provider, str(row.observed).lower()] += row.count
        counts[row.provider, row.tier] += row.count
    slots = {}
    for name, tier in tiers.items():
        slots[name, "used"] = used.get(name, 0)
        slots[name, "free"] = max(0, tier.slots - used.get(name, 0))
    hourly = {
        (name, tier): usage.cost_micro_usd(tier, count * _SECONDS_PER_HOUR, tiers.get(name)) / _MICRO
        for (name, tier), count in counts.items()
    }
    return {
        SANDBOXES: states,
        OVERDUE: sum(row.overdue for row in rows),
        TIERS: counts,
        HOURLY: hourly,
        SLOTS: slots,
        WARM_CAP: {name: tier.slots for name, tier in tiers.items()},
    }
