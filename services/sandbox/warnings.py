"""What an operator should know of the settings of this process before money, warmth or safety is lost. Pure."""

from __future__ import annotations

from services.chassis.settings import PREFIX, Address
from services.sandbox.settings import SandboxSettings
from services.sandbox.tiers import Tier

# Pools renew every 15 s; a lease must outlast two renewals that were late or lost.
_SHORTEST_LEASE = 45.0
# Within this many seconds a sandbox that nobody renews is told to stop.
_LEAK_BOUND = 120.0


def warnings(settings: SandboxSettings) -> tuple[str, ...]:
    """One sentence for each, with the name of the variable."""
    found = []
    if "local" in settings.providers and not Address.parse(settings.listen).loopback:
        found.append(
            f"{PREFIX}PROVIDERS has local, which isolates nothing, and other machines reach this service:"
            " whoever may run an agent owns this one"
        )
    if "daytona" in settings.providers and not settings.daytona_options().volume:
        found.append(f"{PREFIX}DAYTONA_VOLUME is none: the files of a session are lost with its sandbox")
    for name, tier in settings.tiers().items():
        found += _of_tier(name, tier)
    if settings.lease < _SHORTEST_LEASE:
        found.append(
            f"{PREFIX}LEASE={settings.lease:g}: pools renew every 15 s, so two late renewals end a sandbox in use"
        )
    if settings.lease + settings.reconcile_interval > _LEAK_BOUND:
        found.append(
            f"{PREFIX}LEASE={settings.lease:g} and {PREFIX}RECONCILE_INTERVAL={settings.reconcile_interval:g}:"
            f" a forgotten sandbox runs for longer than {_LEAK_BOUND:g} s"
        )
    return tuple(found)


def _of_tier(name: str, tier: Tier) -> list[str]:
    variable = f"{PREFIX}{name.upper()}"
    found = []
    if not tier.park_running and not tier.park_stopped:
        found.append(f"{variable}_PARK_STOPPED is off and nothing is kept running: every turn on {name} is a cold one")
    elif not tier.park_running:
        found.append(f"{variable}_WARM_WINDOW or _WARM_CAP is 0: no turn on {name} is a warm one")
    if name != "local" and tier.price_running == 0:
        found.append(f"{variable}_PRICE_RUNNING is 0: what {name} costs is not counted")
    return found
