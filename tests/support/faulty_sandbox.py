"""`python -m tests.support.faulty_sandbox`: the sandbox service over local sandboxes whose provider fails on command.

A file in the directory `FAULTS` is a switch: `fail-delete` makes deletes fail, `hold-create` makes creates wait for as
long as it is there. Beside that this provider can change the network policy of an instance (it writes it down).
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

import services.sandbox.__main__ as program
from services.chassis.server import run
from services.sandbox.compatibility import Spec
from services.sandbox.providers import switched_on
from services.sandbox.providers.local import LocalProvider
from services.sandbox.providers.port import Address, CreateRequest, DaemonRequest, Instance, ProviderError
from services.sandbox.settings import SandboxSettings

VARIABLE = "FAULTS"


class Faults:
    """The switches; also how a test sets them."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory

    def environment(self) -> dict[str, str]:
        """For the service."""
        return {VARIABLE: str(self._directory)}

    def set(self, switch: str) -> None:
        """`fail-METHOD` or `hold-METHOD`."""
        (self._directory / switch).touch()

    def clear(self, switch: str) -> None:
        """As before `set`."""
        (self._directory / switch).unlink()

    async def entered(self, method: str) -> None:
        """Return when a held call waits."""
        while not (self._directory / f"entered-{method}").exists():  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(0.01)

    async def before(self, method: str) -> None:
        """What the provider does first."""
        if (self._directory / f"fail-{method}").exists():
            raise ProviderError(f"{method} was made to fail")
        while (self._directory / f"hold-{method}").exists():
            (self._directory / f"entered-{method}").touch()
            await asyncio.sleep(0.01)


class FaultyLocal(LocalProvider):
    """The local provider behind switches."""

    _faults = Faults(Path(os.environ[VARIABLE])) if VARIABLE in os.environ else None

    async def _before(self, method: str) -> None:
        if self._faults is not None:
            await self._faults.before(method)

    @property
    def sets_network(self) -> bool:
        return True

    def check(self, spec: Spec) -> None:
        pass

    def baked(self, spec: Spec) -> Mapping[str, str]:
        return {}

    async def create(self, request: CreateRequest) -> Instance:
        await self._before("create")
        made = await super().create(request)
        await self._before("created")
        return made

    async def start(self, reference: str) -> None:
        await self._before("start")
        await super().start(reference)

    async def stop(self, reference: str) -> None:
        await self._before("stop")
        await super().stop(reference)

    async def delete(self, reference: str) -> None:
        await self._before("delete")
        await super().delete(reference)

    async def restart_daemon(self, reference: str, daemon: DaemonRequest) -> Address:
        await self._before("restart_daemon")
        return await super().restart_daemon(reference, daemon)

    async def set_network(self, reference: str, mode: str, allow: Sequence[str]) -> None:
        await self._before("set_network")
        (self._directory(reference) / "network").write_text(" ".join([mode, *allow]))


if __name__ == "__main__":
    setattr(switched_on, "LocalProvider", FaultyLocal)  # noqa: B010 - no name that the type checker lets be set
    run(SandboxSettings, "sandbox", program.build)
