"""What the sandboxes used: time and money per tier, warm slots, orphans."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from services.sandbox.store import Store, TierTotal
from services.sandbox.tiers import Tier

logger = logging.getLogger(__name__)

TIERS = ("active", "parked", "stopped", "orphan")
_SECONDS_PER_HOUR = 3600
_MICRO = 1_000_000


@dataclass(frozen=True, slots=True)
class TierUse:
    """One tier of one provider: present count, seconds and millionths of a US dollar since the deployment began, and
    what the present count costs in an hour."""

    provider: str
    tier: str
    count: int
    seconds: float
    cost_micro_usd: int
    micro_usd_per_hour: int = 0


@dataclass(frozen=True, slots=True)
class SlotUse:
    """Warm slots of one provider, and what an hour with all of them taken costs."""

    provider: str
    cap: int
    used: int
    worst_micro_usd_per_hour: int = 0


@dataclass(frozen=True, slots=True)
class Use:
    """All of it; `as_of` is the database's time."""

    tiers: tuple[TierUse, ...]
    slots: tuple[SlotUse, ...]
    orphans: int
    as_of: datetime


def cost_micro_usd(tier_name: str, seconds: float, tier: Tier | None) -> int:
    """Millionths of a US dollar. Only what is seen stopped is priced as stopped; an orphan may be running."""
    if tier is None:
        return 0
    price = tier.price_stopped if tier_name == "stopped" else tier.price_running
    return round(seconds / _SECONDS_PER_HOUR * price * _MICRO)


def tier_uses(totals: Sequence[TierTotal], tiers: Mapping[str, Tier]) -> tuple[TierUse, ...]:
    """One for each provider that is switched on or was used, and each tier, also where nothing was used."""
    found = {(total.provider, total.tier): total for total in totals}
    providers = [*tiers, *sorted({total.provider for total in totals} - set(tiers))]
    uses = []
    for provider in providers:
        for name in TIERS:
            total = found.get((provider, name), TierTotal(provider, name, 0, 0.0))
            cost = cost_micro_usd(name, total.seconds, tiers.get(provider))
            hourly = cost_micro_usd(name, total.count * _SECONDS_PER_HOUR, tiers.get(provider))
            uses.append(TierUse(provider, name, total.count, total.seconds, cost, hourly))
    return tuple(uses)


async def read(store: Store, tiers: Mapping[str, Tier], project: str | None) -> Use:
    """The use of one project, or of all (None). Warm slots belong to no project and are always those of all."""
    totals = await store.usage(project)
    used = await store.slots_used()
    orphans, as_of = await store.orphans(project)
    slots = tuple(
        SlotUse(name, tier.slots, used.get(name, 0), round(tier.worst_per_hour * _MICRO))
        for name, tier in tiers.items()
    )
    return Use(tier_uses(totals, tiers), slots, orphans, as_of)


def log_tiers(tiers: Mapping[str, Tier]) -> None:
    """Say at start what is kept between turns and what it costs at worst, so that nobody learns it from a bill."""
    for name, tier in tiers.items():
        logger.info(
            "provider is on",
            extra={
                "provider": name,
                "parked_running": tier.park_running,
                "warm_window_seconds": tier.window,
                "warm_cap": tier.slots,
                "parked_stopped": tier.park_stopped,
                "worst_usd_per_hour": round(tier.worst_per_hour, 4),
            },
        )
