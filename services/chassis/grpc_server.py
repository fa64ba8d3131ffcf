"""gRPC's server for asyncio, without a way in which any stranger could end it.

It reads the name of a method that is not registered as UTF-8, in the loop that takes all calls. One request with a name
that is none ends that loop: the port closes and every open stream is cancelled (grpcio 1.85, `_server_main_loop` in
`aio/server.pyx.pxi`). Here a loop of its own answers such calls, and looks at no name. Methods must be registered, as
generated code does.

There is no public way to this; the version of grpcio is held fast by `pyproject.toml`, and a test sends such a request.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Sequence
from typing import Any, cast

import grpc.aio
from grpc.aio import _server

_cygrpc: Any = importlib.import_module("grpc._cython.cygrpc")
# No service of ours has a method of this name, nor can anybody else's.
_NO_METHOD = "/"
_LOOK_SECONDS = 3600.0


class _Core(_cygrpc.AioServer):  # type: ignore[misc]
    """The part that takes calls."""

    def _make_request_call_future(self, method: bytes | None) -> asyncio.Future[Any]:
        """A future of the next call of a registered method; for None, of what is to be done with all others."""
        if method is None:
            return asyncio.ensure_future(self._refuse_unknown())
        future: asyncio.Future[Any] = super()._make_request_call_future(method)
        return future

    async def _refuse_unknown(self) -> None:
        """Answer UNIMPLEMENTED, again and again; ends with the error by which the server says that it stops."""
        loop = asyncio.get_running_loop()
        nothing = _cygrpc._MethodResolver([], {})
        answering: set[asyncio.Task[None]] = set()
        while True:
            call = await self._request_call()
            answer = _cygrpc._handle_rpc(_NO_METHOD, nothing, (), call, loop, False)
            task = loop.create_task(_cygrpc._schedule_rpc_coro(answer, call, loop, _NO_METHOD))
            answering.add(task)
            task.add_done_callback(answering.discard)


class _Server(_server.Server):
    def __init__(self, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, Any]]) -> None:
        # In the place of that of the class above, which would make gRPC's own core.
        self._loop = _cygrpc.get_working_loop()
        self._server = _Core(self._loop, None, (), tuple(interceptors), tuple(options), None)


def new_server(
    *, interceptors: Sequence[grpc.aio.ServerInterceptor], options: Sequence[tuple[str, Any]]
) -> grpc.aio.Server:
    """As `grpc.aio.server`."""
    return cast("grpc.aio.Server", _Server(interceptors, options))


async def served(server: grpc.aio.Server) -> None:
    """Returns when the server was told to stop; raises the error that ended it, if one did."""
    # Without a time, whoever stops waiting would cancel what the server itself waits for.
    while await server.wait_for_termination(_LOOK_SECONDS):
        pass
