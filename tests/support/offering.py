"""Sending on a stream that the server may have ended already."""

from __future__ import annotations

import contextlib
from typing import Any

import grpc.aio


async def offer(call: Any, *messages: bytes, last: bool = True) -> None:
    """Send serialized messages, then the end of them when they are the `last`; how the call ended is told by reading.

    Not by `write`: where the server has ended the call, that puts a status of its own in place of the server's.
    """
    with contextlib.suppress(grpc.aio.InternalError, grpc.aio.AioRpcError):
        await call.wait_for_connection()
        for message in messages:
            await call._cython_call.send_serialized_message(message)
        if last:
            await call.done_writing()
