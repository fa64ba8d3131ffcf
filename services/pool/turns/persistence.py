"""Going on while Postgres is away: a turn is not given up for that, its writes are repeated until they land."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import TypeVar

from services.chassis.clock import Clock
from services.chassis.errors import Unavailable, as_hearth_error
from services.pool.rows import Key

logger = logging.getLogger(__name__)

_FIRST_WAIT = 0.1
_LONGEST_WAIT = 2.0

_T = TypeVar("_T")


async def until_it_lands(clock: Clock, key: Key, what: str, attempt: Callable[[], Awaitable[_T]]) -> _T:
    """Repeat `attempt`, which must be safe to repeat, until it does not fail for a database that is away."""
    wait = _FIRST_WAIT
    while True:
        try:
            return await attempt()
        except Exception as error:
            if not isinstance(as_hearth_error(error), Unavailable):
                raise
            logger.warning(
                "write is repeated, the database is away",
                extra={"session": str(key), "write": what, "cause": type(error).__name__},
            )
        await clock.sleep(wait)
        wait = min(wait * 2, _LONGEST_WAIT)
