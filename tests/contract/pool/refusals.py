"""Calls that must be refused."""

from __future__ import annotations

from collections.abc import Awaitable

import grpc.aio
import pytest

from services.chassis.errors import HearthError, from_rpc_error


async def refused(call: Awaitable[object]) -> HearthError:
    """The refusal of a call, with everything that its status carried."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)
