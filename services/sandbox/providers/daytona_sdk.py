"""The Daytona SDK behind few typed calls. Every call has a time limit of its own, and fails as the port says.

Importing this imports the SDK, which takes two seconds and 85 MB; so it is done only where the provider is on.

What the SDK does that one would not expect, and what is done about it here:

- `timeout` counts only when it is given by keyword, and some calls have none: every call has an outer limit too.
- It may answer a cancelled caller with a result or an error of its own: the cancellation is raised again.
- It asks for nothing again, and one failed look ends its waiting: its waits are short, the provider looks by itself.
- An object of it subscribes to events for five minutes: one object for each sandbox is kept and used again.
- An object that was looked up by id may not know its toolbox: a listing tells.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from daytona import (
    AsyncDaytona,
    AsyncSandbox,
    CreateSandboxFromImageParams,
    CreateSandboxFromSnapshotParams,
    DaytonaConfig,
    DaytonaError,
    ListSandboxesQuery,
    Resources,
    VolumeMount,
)

from hearth.secret import Secret, revealed
from services.chassis.clock import Clock
from services.sandbox.providers.daytona_errors import Subject, translate
from services.sandbox.providers.daytona_options import DaytonaOptions
from services.sandbox.providers.daytona_values import Executed, Making, Network, Preview, Seen
from services.sandbox.providers.port import InstanceNotFound, ProviderError, ProviderUnavailable

_T = TypeVar("_T")

# Given to the SDK's own limits before the outer one ends a call.
_SLACK_SECONDS = 1.0
_PAGE = 100
_MOST_HANDLES = 2000
_HIDDEN = "***"


class Sdk:
    """One client of the API. Raises the errors of the port only."""

    def __init__(self, options: DaytonaOptions, clock: Clock) -> None:
        """Must be called in a running loop: the SDK opens its channel for events at once."""
        self._options = options
        self._clock = clock
        self._closed = False
        self._client = AsyncDaytona(
            DaytonaConfig(
                api_key=options.api_key.reveal(),
                api_url=options.api_url,
                target=options.target or None,
                otel_enabled=False,
                use_deprecated_polling=False,
            )
        )
        # Else it takes one from the environment, or from a `.env` in the working directory.
        self._client._target = options.target or None
        self._handles: OrderedDict[str, AsyncSandbox] = OrderedDict()

    async def create(self, making: Making, seconds: float) -> Seen:
        """Create and wait until it runs. Raises `NameTaken`; after any other error it may exist all the same."""
        work = self._client.create(_parameters(making), timeout=seconds)
        return self._kept(await self._call("create", Subject.CREATE, seconds, work))

    async def get(self, reference: str) -> Seen:
        """The sandbox of this id or name. Raises `InstanceNotFound`."""
        seconds = self._options.call_seconds
        known = self._handles.get(reference)
        if known is None:
            work = self._client.get(reference, request_timeout=seconds)
            return self._kept(await self._call("get", Subject.SANDBOX, seconds, work))
        try:
            await self._call("get", Subject.SANDBOX, seconds, known.refresh_data(request_timeout=seconds))
        except InstanceNotFound:
            self._forget(known)
            raise
        return self._kept(known)

    async def list(self, labels: Mapping[str, str], seconds: float) -> Sequence[Seen]:
        """All sandboxes with these labels, those that are destroyed left out."""
        found = await self._call(
            "list", Subject.ACCOUNT, seconds, self._pages(ListSandboxesQuery(labels=dict(labels), limit=_PAGE))
        )
        by_id = {handle.id: _seen(handle) for handle in found}
        return [seen for seen in by_id.values() if not seen.destroyed]

    def known(self, sandbox_id: str) -> Seen | None:
        """What was last heard of a sandbox, by an answer or an event; None when nothing is remembered."""
        handle = self._handles.get(sandbox_id)
        return None if handle is None else _seen(handle)

    async def start(self, sandbox_id: str, seconds: float) -> Seen:
        """Ask for a start, wait for it, tell what it came to. Raises `StateClash` and `Rejected` when it is not the
        time for it."""
        handle = await self._handle(sandbox_id)
        await self._call("start", Subject.CHANGE, seconds, handle.start(timeout=seconds))
        return _seen(handle)

    async def stop(self, sandbox_id: str, seconds: float) -> Seen:
        """Ask for a stop, wait for it, tell what it came to. Raises as `start`."""
        handle = await self._handle(sandbox_id)
        await self._call("stop", Subject.CHANGE, seconds, handle.stop(timeout=seconds))
        return _seen(handle)

    async def delete(self, sandbox_id: str) -> None:
        """Ask for its deletion; it is not waited for. Raises `InstanceNotFound` and `StateClash`."""
        handle = await self._handle(sandbox_id)
        seconds = self._options.call_seconds
        await self._call("delete", Subject.CHANGE, seconds, handle.delete(timeout=seconds, wait=False))

    async def refresh_activity(self, sandbox_id: str) -> None:
        """Set back the clock of auto-stop."""
        handle = await self._handle(sandbox_id)
        seconds = self._options.call_seconds
        await self._call("refresh", Subject.SANDBOX, seconds, handle.refresh_activity(request_timeout=seconds))

    async def set_network(self, sandbox_id: str, network: Network) -> None:
        """Change the network policy. An open one clears a list."""
        handle = await self._handle(sandbox_id)
        seconds = self._options.call_seconds
        if network.allow:
            work = handle.update_network_settings(network_allow_list=network.allow_text, request_timeout=seconds)
        else:
            work = handle.update_network_settings(network_block_all=network.block_all, request_timeout=seconds)
        await self._call("network", Subject.CHANGE, seconds, work)

    async def preview(self, sandbox_id: str, port: int) -> Preview:
        """Where a port answers now; both parts may change with every start."""
        handle = await self._handle(sandbox_id)
        seconds = self._options.call_seconds
        link = await self._call(
            "preview", Subject.SANDBOX, seconds, handle.get_preview_link(port, request_timeout=seconds)
        )
        return Preview(link.url.rstrip("/"), Secret(link.token or ""))

    async def execute(
        self, sandbox_id: str, command: str, env: Mapping[str, str], seconds: float, *, secrets: Sequence[Secret] = ()
    ) -> Executed:
        """Run a command in the sandbox. `secrets` are kept out of what an error says."""
        handle = await self._reachable(sandbox_id)
        limit = max(1, round(seconds))
        # The SDK gives the daemon in the sandbox five seconds more to tell that it ended the command.
        done = await self._call(
            "execute",
            Subject.INSIDE,
            limit + 5,
            handle.process.exec(command, env=dict(env), timeout=limit),
            secrets=secrets,
        )
        return Executed(-1 if done.exit_code is None else round(done.exit_code), done.result)

    async def volume(self, name: str) -> tuple[str, str]:
        """Id and state of the volume of this name. Raises `VolumeMissing`."""
        found = await self._call("volume", Subject.VOLUME, self._options.call_seconds, self._client.volume.get(name))
        return found.id, _text(found.state)

    async def create_volume(self, name: str) -> None:
        """Create a volume. Raises `StateClash` and `Rejected` where there is one of this name by now."""
        await self._call("volume", Subject.VOLUME, self._options.call_seconds, self._client.volume.create(name))

    async def close(self) -> None:
        """Let go of connections."""
        self._closed = True
        self._handles.clear()
        await self._client.close()  # type: ignore[no-untyped-call]

    async def _call(
        self,
        doing: str,
        subject: Subject,
        seconds: float,
        work: Coroutine[Any, Any, _T],
        *,
        secrets: Sequence[Secret] = (),
    ) -> _T:
        if self._closed:
            work.close()  # else the SDK would open new connections, and nobody would close them
            raise ProviderError(f"{doing}: the connection to Daytona is closed")
        task = asyncio.current_task()
        assert task is not None
        cancels = task.cancelling()
        try:
            async with asyncio.timeout(seconds + _SLACK_SECONDS):
                result = await work
        except TimeoutError:
            raise ProviderUnavailable(f"{doing}: no answer within {seconds:g} s") from None
        except DaytonaError as error:
            if task.cancelling() > cancels:
                raise asyncio.CancelledError from None
            clean = _Cleaner(self._options.api_key, *secrets)
            raise translate(error, doing, subject, clean, self._clock.now()) from None
        if task.cancelling() > cancels:
            raise asyncio.CancelledError
        return result

    async def _pages(self, query: ListSandboxesQuery) -> Sequence[AsyncSandbox]:
        return [handle async for handle in self._client.list(query, request_timeout=self._options.call_seconds)]

    async def _handle(self, sandbox_id: str) -> AsyncSandbox:
        if sandbox_id not in self._handles:
            await self.get(sandbox_id)
        return self._handles[sandbox_id]

    async def _reachable(self, sandbox_id: str) -> AsyncSandbox:
        """The object of a sandbox with the address of its toolbox, which `get` does not look up."""
        handle = await self._handle(sandbox_id)
        if handle.toolbox_proxy_url:
            return handle
        seconds = self._options.call_seconds
        found = await self._call("list", Subject.ACCOUNT, seconds, self._pages(ListSandboxesQuery(id=sandbox_id)))
        for listed in found:
            if listed.id == sandbox_id and listed.toolbox_proxy_url:
                self._kept(listed)
                return listed
        raise ProviderError("the API does not tell where the toolbox of the sandbox is")

    def _kept(self, handle: AsyncSandbox) -> Seen:
        """Remember it by its id, and tell what it shows. Not by name: names are given again."""
        if handle.id not in self._handles or handle.toolbox_proxy_url:
            self._handles[handle.id] = handle
        self._handles.move_to_end(handle.id)
        if len(self._handles) > _MOST_HANDLES:
            self._handles.popitem(last=False)
        return _seen(handle)

    def _forget(self, handle: AsyncSandbox) -> None:
        self._handles.pop(handle.id, None)


class _Cleaner:
    """Takes secrets out of a text."""

    def __init__(self, *secrets: Secret) -> None:
        self._secrets = [secret for secret in secrets if secret]

    def __call__(self, text: str) -> str:
        for secret in self._secrets:
            text = text.replace(secret.reveal(), _HIDDEN)
        return text


def _parameters(making: Making) -> CreateSandboxFromImageParams | CreateSandboxFromSnapshotParams:
    network = making.network
    common = CreateSandboxFromSnapshotParams(
        name=making.name,
        labels=dict(making.labels),
        env_vars=revealed(making.env),
        target=making.target or None,
        auto_stop_interval=making.auto_stop,
        auto_delete_interval=making.auto_delete,
        ttl_minutes=making.ttl or None,
        public=False,
        network_block_all=None if network is None or network.allow else network.block_all,
        network_allow_list=network.allow_text if network is not None and network.allow else None,
        volumes=[
            VolumeMount.model_validate({"volume_id": m.volume_id, "mount_path": m.path, "subpath": m.subpath})
            for m in making.mounts
        ],
    )
    if not making.image:
        common.snapshot = making.snapshot or None
        return common
    resources = None
    if making.cpus or making.memory or making.disk:
        resources = Resources(cpu=making.cpus or None, memory=making.memory or None, disk=making.disk or None)
    given = common.model_dump(exclude={"snapshot", "volumes"})
    return CreateSandboxFromImageParams(**given, volumes=common.volumes, image=making.image, resources=resources)


def _seen(handle: AsyncSandbox) -> Seen:
    """What the object shows now. It changes under us with every event, so it is read at once."""
    return Seen(
        id=handle.id,
        name=handle.name,
        state=_text(handle.state),
        desired=_text(handle.desired_state),
        labels=dict(handle.labels),
        created_at=handle.created_at or "",
        reason=handle.error_reason or "",
        block_all=handle.network_block_all,
        allow=handle.network_allow_list,
    )


def _text(value: object) -> str:
    """The text of a value of an enumeration, also of one that came as text; empty for none."""
    return "" if value is None else str(getattr(value, "value", value))
