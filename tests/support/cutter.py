"""A TCP proxy that breaks connections in the ways in which they break."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable
from typing import Self


class Cutter:
    """Passes bytes on to `host:port`; `address` is where it listens.

    `cut` ends all connections at once. `silent` keeps them and passes nothing back. `silence_stream` does so to the
    newest connection that began with a GET. `cut_after` ends all once so many bytes more have come back. `heads` are
    the first bytes of each piece that went forth. With `tls` it speaks that to who connects, and plainly to the target.
    """

    def __init__(self, target: str, *, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self._host, _, port = target.removeprefix("http://").rpartition(":")
        self._port = int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._serving: set[asyncio.Task[None] | None] = set()
        self._deaf = asyncio.Event()
        self.silent = False
        self.cut_after: int | None = None
        self.connections = 0
        self.heads: list[bytes] = []
        self.address = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        while self._serving:
            self.cut()
            await asyncio.sleep(0.001)
        await self._server.wait_closed()

    @property
    def url(self) -> str:
        """`address` for HTTP."""
        return f"http://{self.address}"

    def cut(self) -> None:
        """End all connections."""
        for writer in self._writers:
            writer.transport.abort()

    def fall_silent(self) -> None:
        """From now on no connection brings anything."""
        self.silent = True

    def silence_stream(self) -> None:
        """The newest stream brings nothing any more."""
        self._deaf.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._serving.add(asyncio.current_task())
        try:
            await self._pass_on(reader, writer)
        finally:
            self._serving.discard(asyncio.current_task())

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        except OSError:
            writer.transport.abort()
            return
        mine = {writer, far_writer}
        self._writers |= mine
        deaf = asyncio.Event()

        async def forth(data: bytes) -> None:
            self.heads.append(data[:2048])
            if data.startswith(b"GET"):
                self._deaf = deaf
            far_writer.write(data)
            await far_writer.drain()

        async def back(data: bytes) -> None:
            if self.silent or deaf.is_set():
                return
            if self.cut_after is not None and (left := self.cut_after - len(data)) < 0:
                self.cut_after = None
                self.cut()
                return
            self.cut_after = left if self.cut_after is not None else None
            writer.write(data)
            await writer.drain()

        try:
            await asyncio.gather(_copy(reader, forth, far_writer), _copy(far_reader, back, writer))
        except ConnectionError:
            pass
        finally:
            self._writers -= mine
            for end in mine:
                end.transport.abort()


async def _copy(
    reader: asyncio.StreamReader, give: Callable[[bytes], Awaitable[None]], far: asyncio.StreamWriter
) -> None:
    while data := await reader.read(4096):
        await give(data)
    far.close()
