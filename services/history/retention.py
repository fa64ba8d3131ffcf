"""Removing events: old prefixes of a log, and whole logs, in batches that hold the log's row only for a moment.

What an ended execution wrote stays fenced, because ledger rows outlive a trim. An event id is forgotten with its event:
a producer that sends a *session* event again after it was trimmed appends it anew, so trim only what is long settled.

Events go by age, too, where a setting says so. Replicas walk over all logs together: each takes the next slice of them
from a row in Postgres, so no log is looked at twice in a round, and nobody holds a lock while it waits for another. Age
is told by the clock of Postgres alone, which also stamped the events.
"""

from __future__ import annotations

import logging
from datetime import timedelta

from services.chassis.clock import Clock
from services.chassis.errors import FailedPrecondition, HearthError, OutOfRange, Unavailable, as_hearth_error
from services.history import replies
from services.history.store import Bounds, Store
from services.history.validate import Key

logger = logging.getLogger(__name__)

_BATCH = 1_000
_LOGS_PER_SWEEP = 100
_SWEEP_SECONDS = 60.0
# Removal by age: how often all logs are looked at, how many at a time, and the rest between two steps.
_ROUND = timedelta(hours=1)
_LOGS_PER_SLICE = 1_000
_EXPIRY_LOOK_SECONDS = 60.0
_PAUSE_SECONDS = 0.05


class Retention:
    """Trims and deletes logs."""

    def __init__(self, store: Store, clock: Clock, *, batch: int = _BATCH) -> None:
        self._store = store
        self._clock = clock
        self._batch = batch

    async def trim(self, key: Key, through: int) -> Bounds:
        """Remove the events up to and including `through`; the bounds after it.

        A call that is cut off has removed a part, and goes on where it stopped when it is made again.
        """
        log, bounds = await self._store.bounds(key)
        if through > bounds.head:
            raise _refused(OutOfRange, "CURSOR_AHEAD", f"through {through} is above the head {bounds.head}", bounds)
        while not bounds.deleted and bounds.oldest <= through:
            oldest = await self._store.trim_batch(log, through, self._batch)
            if oldest is None:
                break
            bounds = Bounds(bounds.log_id, oldest, bounds.head)
        log, bounds = await self._store.bounds(key)
        if bounds.deleted:
            raise _refused(FailedPrecondition, "LOG_DELETED", "the log was deleted", bounds)
        logger.info("log trimmed", extra={"project": key[0], "session": key[1], "oldest": bounds.oldest})
        return bounds

    async def delete(self, key: Key) -> None:
        """Leave a tombstone and remove the rest. From the first moment on the log refuses everything.

        A session that has no log gets a tombstone too, so that nothing that is still on its way makes one.
        """
        log, purged = await self._store.delete_log(key)
        logger.info("log deleted", extra={"project": key[0], "session": key[1]})
        if not purged:
            await self._purge(log)

    async def sweep(self) -> None:
        """For ever: finish deletes whose call was cut off."""
        while True:
            try:
                for log in await self._store.logs_to_purge(_LOGS_PER_SWEEP):
                    await self._purge(log)
            except Exception as error:
                if not _passing(error):
                    raise
                logger.warning("purge put off", extra={"cause": type(error).__name__})
            await self._clock.sleep(_SWEEP_SECONDS)

    async def expire(self, age: timedelta) -> None:
        """For ever: remove events that were stored longer ago than `age`."""
        while True:
            try:
                found = await self.expire_slice(age, every=_ROUND)
            except Exception as error:
                if not _passing(error):
                    raise
                logger.warning("removal of old events put off", extra={"cause": type(error).__name__})
                found = None
            await self._clock.sleep(_EXPIRY_LOOK_SECONDS if found is None else _PAUSE_SECONDS)

    async def expire_slice(self, age: timedelta, *, every: timedelta, logs: int = _LOGS_PER_SLICE) -> int | None:
        """Take the next slice of the logs and remove its old events; how many went, None when no slice is due."""
        due = await self._store.next_expiry(logs, every)
        if due is None:
            return None
        removed = 0
        expired = await self._store.expired_logs(*due, age)
        for log in expired:
            while batch := await self._store.expire_batch(log, age, self._batch):
                removed += batch
                await self._clock.sleep(_PAUSE_SECONDS)
        if expired:
            logger.info("old events removed", extra={"logs": len(expired), "events": removed})
        return removed

    async def _purge(self, log: int) -> None:
        while True:
            if not await self._store.purge_batch(log, self._batch):
                return


def _passing(error: Exception) -> bool:
    return isinstance(as_hearth_error(error), Unavailable)


def _refused(kind: type[HearthError], reason: str, message: str, bounds: Bounds) -> HearthError:
    metadata = {"log_id": bounds.log_id, "oldest": str(replies.kept_from(bounds)), "head": str(bounds.head)}
    return kind(message, reason=reason, metadata=metadata)
