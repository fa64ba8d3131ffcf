"""The stand-in as a whole: its start, its end, and what a test asks of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from tests.support.daytona.delays import Delays
from tests.support.daytona.faults import Faults
from tests.support.daytona.journal import Journal


class RunningStandIn:
    """A stand-in that serves."""

    url: str
    """For `api_url` of the SDK."""
    api_key: str
    faults: Faults
    log: Journal

    def running(self) -> int:
        """How many sandboxes cost processor and memory now, those on their way in or out included."""
        raise NotImplementedError

    def counts(self) -> Mapping[str, int]:
        """How many sandboxes are in each state."""
        raise NotImplementedError

    async def release(self) -> None:
        """Let every stuck transition go on."""
        raise NotImplementedError


class StandIn:
    """Makes them."""

    @staticmethod
    def running(
        directory: Path,
        *,
        delays: Delays | None = None,
        agent_command: Sequence[str] = (),
        port: int = 0,
    ) -> AbstractAsyncContextManager[RunningStandIn]:
        """Serve on loopback from `directory` until the context ends; then no process and no link of it is left.

        `agent_command` is what `sandbox-agent` means in a sandbox; arguments given to it are added.
        """
        return _running(directory, delays or Delays.none(), tuple(agent_command), port)


@asynccontextmanager
async def _running(
    directory: Path, delays: Delays, agent_command: Sequence[str], port: int
) -> AsyncIterator[RunningStandIn]:
    raise NotImplementedError
    yield RunningStandIn()
