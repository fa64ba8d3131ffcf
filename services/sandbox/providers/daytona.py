"""Sandboxes at Daytona, through its official SDK.

An instance is a Daytona sandbox under the unique name of its row, with our labels, with timers that stop and delete it
if everybody forgets it, and with the workspace of its session mounted from the volume of the deployment. It has one
daemon, started anew by `restart_daemon` after everything else in it was seen dead. The daemon's token and the secrets
are in its environment and on no disk.

What a create leaves that fails or is given up is removed by this process; after a crash the reconciler finds it by its
labels. This module loads no SDK; `connect` does.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Mapping, Sequence
from ipaddress import ip_network
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from services.chassis.clock import Clock, Ids
from services.sandbox.compatibility import Spec
from services.sandbox.providers.daytona_daemon import DaemonStarter
from services.sandbox.providers.daytona_lifecycle import Lifecycle
from services.sandbox.providers.daytona_options import NAME, DaytonaOptions
from services.sandbox.providers.daytona_states import (
    instance_state,
    shown_network,
    to_instance,
    wanted_network,
)
from services.sandbox.providers.daytona_values import ATTEMPT_LABEL, Making
from services.sandbox.providers.daytona_volume import Volume
from services.sandbox.providers.port import (
    Address,
    CreateRequest,
    DaemonFailed,
    DaemonRequest,
    Instance,
    InstanceState,
    ProviderError,
    ProviderRefused,
    ProviderUnavailable,
    StillAlive,
    within,
)
from services.sandbox.rows import NAME_PREFIX, Key

if TYPE_CHECKING:
    from services.sandbox.providers.daytona_sdk import Sdk

_SDK = "services.sandbox.providers.daytona_sdk"
_MIB_IN_A_GIB = 1024


class DaytonaProvider:
    """Sandboxes of one Daytona organisation. Make it with `connect`."""

    def __init__(self, sdk: Sdk, options: DaytonaOptions, clock: Clock, ids: Ids) -> None:
        self._sdk = sdk
        self._options = options
        self._clock = clock
        self._ids = ids
        self._lifecycle = Lifecycle(sdk, options, clock)
        self._daemons = DaemonStarter(sdk, options, clock)
        self._volume = Volume(sdk, options, self._lifecycle, clock, ids)
        self._restarting: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    @classmethod
    async def connect(cls, options: DaytonaOptions, clock: Clock, ids: Ids) -> DaytonaProvider:
        """The provider; no sandbox is asked for yet. Loads the SDK, beside the loop since that takes seconds."""
        module = await asyncio.to_thread(importlib.import_module, _SDK)
        sdk: Sdk = module.Sdk(options, clock)
        return cls(sdk, options, clock, ids)

    @property
    def name(self) -> str:
        return NAME

    @property
    def sets_network(self) -> bool:
        return True

    def check(self, spec: Spec) -> None:
        if spec.snapshot and spec.image:
            raise ProviderRefused("a sandbox is made from a snapshot or from an image, not from both", field="image")
        sized = spec.cpus or spec.memory_mib or spec.disk_mib
        if sized and not self._made_from(spec)[1]:
            raise ProviderRefused("at Daytona the snapshot says the sizes; only an image takes them", field="resources")
        if any(ip_network(address.strip(), strict=False).version != 4 for address in spec.allow):
            raise ProviderRefused("Daytona takes IPv4 addresses only", field="network")
        if any(name.startswith("DAYTONA_") for name in (*spec.env, *(secret.name for secret in spec.secrets))):
            raise ProviderRefused("variables that begin with DAYTONA_ are set by Daytona", field="env")

    def baked(self, spec: Spec) -> Mapping[str, str]:
        snapshot, image = self._made_from(spec)
        options = self._options
        return {
            "snapshot": snapshot,
            "image": image,
            "target": spec.target or options.target,
            "volume": options.volume,
            "mount": options.mount,
        }

    def workspace(self, key: Key) -> str:
        return self._volume.workspace(key)

    async def create(self, request: CreateRequest) -> Instance:
        spec, options = request.spec, self._options
        self.check(spec)
        snapshot, image = self._made_from(spec)
        making = Making(
            name=request.name,
            labels={**request.labels, ATTEMPT_LABEL: self._ids.new()},
            snapshot=snapshot,
            image=image,
            target=spec.target or options.target,
            cpus=spec.cpus,
            memory=_gib(spec.memory_mib),
            disk=_gib(spec.disk_mib),
            env=dict(spec.env),
            mounts=await self._volume.mounts(request.key),
            network=wanted_network(spec.network, spec.allow),
            auto_stop=options.auto_stop_minutes,
            auto_delete=options.auto_delete_minutes,
        )
        return to_instance(await self._lifecycle.create(making), self._clock.now())

    async def get(self, reference: str) -> Instance:
        seen = await self._lifecycle.look(reference, self._lifecycle.until(self._options.call_seconds))
        return to_instance(seen, self._clock.now())

    async def list(self, labels: Mapping[str, str]) -> Sequence[Instance]:
        seconds = self._options.start_seconds
        found = await within(seconds, self._clock, lambda: self._sdk.list(labels, seconds))
        return [to_instance(seen, self._clock.now()) for seen in found]

    async def start(self, reference: str) -> None:
        await self._lifecycle.run(reference, self._lifecycle.until(self._options.start_seconds))

    async def stop(self, reference: str) -> None:
        await self._lifecycle.stop(reference, self._lifecycle.until(self._options.stop_seconds))

    async def delete(self, reference: str) -> None:
        await self._lifecycle.delete(reference, self._lifecycle.until(self._options.delete_seconds))

    async def refresh_activity(self, reference: str) -> None:
        if reference.startswith(NAME_PREFIX):
            reference = (await self._sdk.get(reference)).id
        await self._sdk.refresh_activity(reference)

    async def restart_daemon(self, reference: str, daemon: DaemonRequest) -> Address:
        until = self._lifecycle.until(self._options.daemon_seconds)
        # Two at once would end each other's work, over and over.
        lock = self._restarting.setdefault(reference, asyncio.Lock())

        # What was last heard to run is entered at once; only if that fails it is looked at.
        seen = known = self._sdk.known(reference)
        doubted: InstanceState | None = None

        async def restart() -> Address:
            nonlocal seen, doubted
            if seen is None or instance_state(seen) is not InstanceState.RUNNING:
                seen = await self._lifecycle.look(reference, until)
            state = instance_state(seen)
            if state is not InstanceState.RUNNING:
                trouble = f"{reference} is {seen.state}, not started"
                seen = None
                # One look may be of before, and what an unknown state means nobody knows.
                if state is InstanceState.ERROR or (state is doubted and state is not InstanceState.UNKNOWN):
                    raise ProviderError(trouble)
                doubted = state
                raise ProviderUnavailable(trouble)
            found, seen = seen, None
            try:
                return await self._daemons.restart(found.id, self.workspace(daemon.key), daemon, until)
            except (StillAlive, DaemonFailed, ProviderUnavailable):
                raise
            except ProviderError as trouble:
                if found is not known:
                    raise
                raise ProviderUnavailable(str(trouble)) from None

        async with lock:
            # Longer than the daemon itself is given, so that what its log says is told and not that the time is up.
            return await within(self._options.daemon_seconds + self._options.call_seconds, self._clock, restart)

    async def endpoint(self, reference: str) -> Address:
        until = self._lifecycle.until(self._options.call_seconds)

        async def ask() -> Address:
            return await self._daemons.address((await self._lifecycle.look(reference, until)).id)

        return await within(self._options.call_seconds, self._clock, ask)

    async def set_network(self, reference: str, mode: str, allow: Sequence[str]) -> None:
        wanted = wanted_network(mode, allow)
        if wanted is None:
            return
        until = self._lifecycle.until(self._options.start_seconds)

        async def converge() -> None:
            seen = await self._lifecycle.look(reference, until)
            if shown_network(seen) == wanted:
                return
            await self._sdk.set_network(seen.id, wanted)
            if shown_network(await self._lifecycle.look(reference, until)) != wanted:
                raise ProviderUnavailable(f"the network policy of {reference} is not in force")

        await within(self._options.start_seconds, self._clock, converge)

    async def delete_workspace(self, key: Key) -> None:
        await self._volume.empty(key)

    async def close(self) -> None:
        await self._lifecycle.close()
        await self._daemons.close()
        await self._sdk.close()

    def _made_from(self, spec: Spec) -> tuple[str, str]:
        """Snapshot and image, one of them empty: what the spec names, else what the deployment has."""
        if spec.snapshot or spec.image:
            return spec.snapshot, spec.image
        return self._options.snapshot, "" if self._options.snapshot else self._options.image


def _gib(mib: int) -> int:
    """Daytona counts in whole GiB."""
    return -(-mib // _MIB_IN_A_GIB)
