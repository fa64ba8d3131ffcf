"""The way of a service to its database, which can be shut."""

from __future__ import annotations

import asyncio
from urllib.parse import urlsplit, urlunsplit

from tests.support.cutter import Cutter


class Door(Cutter):
    """A proxy that can be shut: then connections end, and none begins."""

    closed = False

    def shut(self) -> None:
        """End all connections and take none."""
        self.closed = True
        self.cut()

    def open(self) -> None:
        """Pass on again."""
        self.closed = False

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self.closed:
            writer.transport.abort()
        else:
            await super()._pass_on(reader, writer)


def door_to(dsn: str) -> Door:
    """A door before a database."""
    parts = urlsplit(dsn)
    return Door(f"{parts.hostname}:{parts.port}")


def through(door: Door, dsn: str) -> str:
    """The database behind a door that is there."""
    parts = urlsplit(dsn)
    user = parts.netloc.rpartition("@")[0]
    return urlunsplit(parts._replace(netloc=f"{user}@{door.address}"))
