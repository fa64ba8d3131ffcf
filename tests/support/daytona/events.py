"""Socket.IO events, as the real service sends them to its dashboard and to the SDK."""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

from aiohttp import web

from tests.support.daytona.fleet import Fleet
from tests.support.daytona.sandbox import Sandbox, full

_PATH = "/api/socket.io"


class Events:
    """Tells connected clients of every change of a sandbox."""

    def __init__(self, app: web.Application, fleet: Fleet, api_key: str, toolbox_url: str) -> None:
        # It comes with the SDK and has no types.
        self._server: Any = importlib.import_module("socketio").AsyncServer(
            async_mode="aiohttp", cors_allowed_origins="*", logger=False, engineio_logger=False
        )
        self._toolbox_url = toolbox_url
        self._sending: set[asyncio.Task[None]] = set()

        async def connect(_: str, __: Any, auth: Any = None) -> bool:
            return isinstance(auth, dict) and auth.get("token") == api_key

        self._server.on("connect", connect)
        self._server.attach(app, _PATH)
        fleet.listen(self._changed)

    async def close(self) -> None:
        """Disconnect everybody."""
        await self._server.shutdown()
        for task in self._sending:
            task.cancel()

    def _changed(self, sandbox: Sandbox, old: str) -> None:
        shown = full(sandbox, self._toolbox_url)
        if old:
            self._send("sandbox.state.updated", {"sandbox": shown, "oldState": old, "newState": sandbox.state})
        else:
            self._send("sandbox.created", shown)

    def _send(self, event: str, data: Any) -> None:
        task = asyncio.get_running_loop().create_task(self._server.emit(event, data))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)
