"""What stands before the replicas of a service, as its address in a cluster does: connections that are made go to the
replica that counts now, those that are there stay where they are."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager

from tests.support.cutter import Cutter


class Front(Cutter):
    """Listens at `address`; `lead_to` says where connections go from now on."""

    def __init__(self) -> None:
        super().__init__("127.0.0.1:0")

    def lead_to(self, address: str) -> None:
        """host:port of a replica."""
        self._host, _, port = address.rpartition(":")
        self._port = int(port)


@asynccontextmanager
async def fronts(names: Iterable[str]) -> AsyncIterator[dict[str, Front]]:
    """One for each service."""
    async with AsyncExitStack() as stack:
        yield {name: await stack.enter_async_context(Front()) for name in names}
