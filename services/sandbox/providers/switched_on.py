"""The providers that the settings switch on."""

from __future__ import annotations

from services.chassis.clock import Clock, Ids
from services.sandbox.providers.daytona import DaytonaProvider
from services.sandbox.providers.local import LocalProvider
from services.sandbox.providers.port import Provider
from services.sandbox.settings import SandboxSettings


async def connect(settings: SandboxSettings, clock: Clock, ids: Ids) -> dict[str, Provider]:
    """One of each, by its name. Must be called in the loop in which they are used."""
    providers: dict[str, Provider] = {}
    if "local" in settings.providers:
        providers["local"] = LocalProvider(
            settings.local_root,
            clock,
            inherit=settings.local_inherit,
            daemon=settings.local_daemon,
            host=settings.local_host,
        )
    if "daytona" in settings.providers:
        providers["daytona"] = await DaytonaProvider.connect(settings.daytona_options(), clock, ids)
    return providers
