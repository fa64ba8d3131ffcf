"""One call with bytes for messages, and how the server really ended it."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from hearth.errors import read_error
from tests.fuzz.callers import Metadata
from tests.support.rpcs import Rpc

_CANCELS = 0.05
_STALLS = 0.2
_STALL_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Answer:
    """How a call ended, after how many responses: `reason` is empty where no status of ours came; `given_up` by this
    side, before the server."""

    code: grpc.StatusCode
    detail: str
    reason: str
    responses: int = 0
    given_up: bool = False


async def call(
    rpc: Rpc,
    channel: grpc.aio.Channel,
    requests: Iterable[bytes],
    chance: random.Random,
    *,
    seconds: float,
    metadata: Metadata,
    compression: grpc.Compression,
) -> Answer:
    """Make the call, and give it up after `seconds`, or sometimes at a response."""
    options: dict[str, Any] = {"timeout": seconds, "metadata": metadata, "compression": compression}
    sending: asyncio.Task[None] | None = None
    if rpc.streams_in:
        made = rpc.on(channel)(**options)
        sending = asyncio.create_task(_send(made, requests, stalls=chance.random() < _STALLS))
    else:
        made = rpc.on(channel)(*requests, **options)
    responses, given_up = 0, False
    try:
        if rpc.streams_out:
            while not given_up and await made.read() is not grpc.aio.EOF:
                responses += 1
                given_up = chance.random() < _CANCELS and made.cancel()
        else:
            await made
    except grpc.aio.AioRpcError:
        pass
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
    finally:
        if sending is not None:
            sending.cancel()
            await asyncio.wait([sending])
    code, detail = await made.code(), await made.details() or ""
    error = grpc.aio.AioRpcError(code, await made.initial_metadata(), await made.trailing_metadata(), detail)
    return Answer(code, detail, read_error(error).reason, responses, given_up)


async def _send(made: Any, requests: Iterable[bytes], *, stalls: bool) -> None:
    """Send `requests`, and then neither more nor the end of them for a while where it `stalls`."""
    try:
        await made.wait_for_connection()
        for request in requests:
            # Not by `write`: where the server has ended the call, that puts a status of its own in place of the
            # server's.
            await made._cython_call.send_serialized_message(request)
        if stalls:
            await asyncio.sleep(_STALL_SECONDS)
        await made.done_writing()
    except (grpc.aio.InternalError, grpc.aio.AioRpcError):
        # The reading tells how the call ended.
        return
