"""The volume of the deployment, with a directory for the workspace of each session."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING
from urllib.parse import quote

from services.chassis.clock import Clock, Ids
from services.sandbox.providers import daytona_inside as inside
from services.sandbox.providers.daytona_lifecycle import Lifecycle
from services.sandbox.providers.daytona_options import DaytonaOptions
from services.sandbox.providers.daytona_values import (
    ATTEMPT_LABEL,
    JANITOR_LABEL,
    Making,
    Mount,
    Rejected,
    StateClash,
    VolumeMissing,
)
from services.sandbox.providers.port import ProviderError, ProviderUnavailable, within
from services.sandbox.rows import NAME_PREFIX, Key

if TYPE_CHECKING:
    from services.sandbox.providers.daytona_sdk import Sdk

_JANITOR_MINUTES = 5
_USELESS = frozenset({"error", "deleting", "deleted", "pending_delete"})


class Volume:
    """Mounts of workspaces, and their end. Where no volume is set, there is nothing to mount and nothing to end."""

    def __init__(self, sdk: Sdk, options: DaytonaOptions, lifecycle: Lifecycle, clock: Clock, ids: Ids) -> None:
        self._sdk = sdk
        self._options = options
        self._lifecycle = lifecycle
        self._clock = clock
        self._ids = ids
        self._lock = asyncio.Lock()
        self._id = ""

    def workspace(self, key: Key) -> str:
        """The directory of a session, the same in every sandbox."""
        return f"{self._options.mount}/{subpath(key)}"

    async def mounts(self, key: Key) -> tuple[Mount, ...]:
        """What a sandbox of the session mounts; makes the volume at its first use."""
        if not self._options.volume:
            return ()
        volume_id = await within(self._options.start_seconds, self._clock, lambda: self._ready(create=True))
        return (Mount(volume_id, subpath(key), self.workspace(key)),)

    async def empty(self, key: Key) -> None:
        """Remove what a session has in the volume.

        Daytona has no call for it. A sandbox is made that lives for this only, sees this directory only, reaches no
        network, and is ended by its timers if not by us.
        """
        options = self._options
        if not options.volume:
            return
        volume_id = await within(options.start_seconds, self._clock, lambda: self._ready(create=False))
        if not volume_id:
            return
        attempt = self._ids.new()
        directory = f"{options.mount}/janitor-{attempt}"
        making = Making(
            name=f"{NAME_PREFIX}janitor-{attempt}",
            labels={ATTEMPT_LABEL: attempt, JANITOR_LABEL: "1"},
            snapshot=options.snapshot,
            image="" if options.snapshot else options.image,
            target=options.target,
            mounts=(Mount(volume_id, subpath(key), directory),),
            auto_stop=_JANITOR_MINUTES,
            auto_delete=0,
            ttl=3 * _JANITOR_MINUTES,
        )
        sandbox_id = (await self._lifecycle.create(making)).id
        try:
            await within(options.daemon_seconds, self._clock, lambda: self._remove(sandbox_id, directory))
        finally:
            await asyncio.shield(self._lifecycle.remove_late(making.name, attempt))

    async def _remove(self, sandbox_id: str, directory: str) -> None:
        script = inside.empty_script(directory)
        done = await self._sdk.execute(sandbox_id, script, {}, self._options.daemon_seconds)
        if inside.read(done.output).word != "emptied":
            raise ProviderUnavailable(f"the workspace was not emptied (exit code {done.code})")

    async def _ready(self, *, create: bool) -> str:
        """The id of the volume once it can be mounted; empty when there is none and none is to be made."""
        if self._id:
            return self._id
        refused: ProviderError | None = None
        async with self._lock:
            while True:
                try:
                    found, state = await self._sdk.volume(self._options.volume)
                except VolumeMissing:
                    if not create:
                        return ""
                    if refused is not None:
                        raise refused from None
                    try:
                        await self._sdk.create_volume(self._options.volume)
                    except (StateClash, Rejected) as trouble:
                        refused = trouble  # unless another one was faster
                    continue
                if state == "ready":
                    self._id = found
                    return found
                if state in _USELESS:
                    raise ProviderError(f"the volume {self._options.volume} is {state}")
                await self._clock.sleep(self._options.first_pause)


def subpath(key: Key) -> str:
    """A session as a path: nothing in an id may climb out of it."""
    return f"{_part(key.project)}/{_part(key.session)}"


def _part(text: str) -> str:
    return re.sub(r"^\.", "%2E", quote(text, safe=""))
