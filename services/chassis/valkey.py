"""Valkey (or Redis): the client for commands, and what a start checks. Pub/sub has its own client in `pubsub`."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import TYPE_CHECKING, Any

import hiredis
import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, RedisError
from redis.exceptions import ConnectionError as ValkeyConnectionError
from redis.exceptions import TimeoutError as ValkeyTimeoutError

from services.chassis.settings import EXIT_USAGE, StartupError, ValkeySettings

if TYPE_CHECKING:
    from redis.asyncio import Redis
    from redis.asyncio.connection import AbstractConnection

logger = logging.getLogger(__name__)

# A blocking command gets this on top of the time it asks the server to block.
_BLOCK_MARGIN_SECONDS = 2.0
_RETRY_SECONDS = 0.5
_POLICY = "noeviction"


async def create_client(settings: ValkeySettings, *, blocks: float = 0.0, size: int | None = None) -> Redis:
    """A client over a pool of connections, checked; close it with `async with client:`.

    `blocks` is the longest time, in seconds, that a command of this client asks the server to block; the socket timeout
    lies above it. Nothing is retried here: a script that got no answer may have run. Commands raise
    `redis.exceptions.ConnectionError` or `TimeoutError` when the server is away or no connection gets free in time,
    which callers see as UNAVAILABLE.

    Waits up to `valkey_start_timeout` for the server. Raises `StartupError` when it does not answer, or may evict keys.
    """
    pool = redis.asyncio.BlockingConnectionPool.from_url(
        settings.valkey_url.reveal(),
        max_connections=size or settings.valkey_pool_size,
        timeout=settings.valkey_acquire_timeout,
        socket_connect_timeout=settings.valkey_connect_timeout,
        socket_timeout=max(settings.valkey_command_timeout, blocks + _BLOCK_MARGIN_SECONDS if blocks else 0.0),
        socket_keepalive=True,
        retry=Retry(NoBackoff(), 0),
        retry_on_error=[],
        client_name="hearth",
    )
    pool.connection_class = _packing_in_c(pool.connection_class)
    client: Redis = redis.asyncio.Redis.from_pool(pool)
    try:
        await _check(client, settings.valkey_start_timeout)
    except BaseException:
        await client.aclose()
        raise
    return client


def _packing_in_c(connection: type[AbstractConnection]) -> type[AbstractConnection]:
    """`connection` with its commands packed by hiredis: redis-py takes a microsecond for each argument of a command."""

    class Packing(connection):  # type: ignore[misc,valid-type]
        def pack_command(self, *args: Any) -> list[bytes]:
            name, *rest = args
            # As in redis-py, a name of two words stands for two arguments.
            words = name.split() if isinstance(name, str | bytes) else [name]
            return [hiredis.pack_command((*words, *rest))]

    return Packing


async def ping(client: Redis) -> None:
    """Return when the server answers; for health checks."""
    await client.ping()


async def _check(client: Redis, timeout: float) -> None:
    ends = time.monotonic() + timeout
    while True:
        try:
            memory: dict[str, Any] = await client.info("memory")
            break
        except AuthenticationError as error:
            raise StartupError(f"HEARTH_VALKEY_URL is wrong: {error}", exit_code=EXIT_USAGE) from None
        except (ValkeyConnectionError, ValkeyTimeoutError, OSError) as error:
            if time.monotonic() >= ends:
                raise StartupError(f"Valkey at HEARTH_VALKEY_URL does not answer: {error}") from None
            logger.info("waiting for Valkey", extra={"cause": type(error).__name__})
            await asyncio.sleep(_RETRY_SECONDS)
        except RedisError as error:
            raise StartupError(f"Valkey at HEARTH_VALKEY_URL: {error}") from None
    policy = memory.get("maxmemory_policy")
    if policy != _POLICY:
        raise StartupError(
            f"Valkey runs with maxmemory-policy {policy}: it would drop live frames and fences in silence."
            f" Set it to {_POLICY}.",
            exit_code=EXIT_USAGE,
        )
