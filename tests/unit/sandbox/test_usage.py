"""Money: what time in a tier costs, and what a deployment costs at worst."""

from __future__ import annotations

import pytest

from services.sandbox.store import TierTotal
from services.sandbox.tiers import Tier
from services.sandbox.usage import cost_micro_usd, tier_uses

TIER = Tier(window=120, cap=20, park_stopped=True, price_running=0.17, price_stopped=0.0009)


@pytest.mark.parametrize(
    ("tier", "seconds", "micro"),
    [("active", 3600, 170_000), ("parked", 120, 5_667), ("orphan", 3600, 170_000), ("stopped", 3600, 900)],
)
def test_only_what_is_seen_stopped_has_the_lower_price(tier: str, seconds: float, micro: int) -> None:
    assert cost_micro_usd(tier, seconds, TIER) == micro


def test_a_provider_that_is_switched_off_is_still_shown() -> None:
    uses = tier_uses([TierTotal("old", "stopped", 2, 10.0)], {"local": TIER})
    assert [(use.provider, use.tier, use.count) for use in uses if use.count] == [("old", "stopped", 2)]
    assert {use.provider for use in uses} == {"local", "old"}
    assert len(uses) == 8


def test_worst_cost_is_every_slot_taken_and_nothing_when_the_tier_is_off() -> None:
    assert TIER.worst_per_hour == pytest.approx(3.4)
    off = Tier(window=0, cap=20, park_stopped=True, price_running=0.17)
    assert (off.slots, off.worst_per_hour, off.park_running) == (0, 0, False)
    assert not Tier(window=120, cap=0, park_stopped=True).park_running
