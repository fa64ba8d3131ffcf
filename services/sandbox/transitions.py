"""Changing what a sandbox is: one worker at a time, under a deadline that the database times.

A worker first writes itself into the row by compare-and-set, then calls the provider, then writes the outcome, again by
compare-and-set. A worker that dies leaves its name and a deadline; past it, whoever comes looks at the instance and
takes over. Every method that returns None lost such a race: read the row again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from services.chassis import crashpoints
from services.chassis.clock import Clock
from services.sandbox.metrics import Metrics
from services.sandbox.providers.port import (
    Instance,
    InstanceNotFound,
    InstanceState,
    Provider,
    ProviderError,
    ProviderUnavailable,
    within,
)
from services.sandbox.rows import Key, Row
from services.sandbox.states import Desired, Disposition, Observed, Tenure
from services.sandbox.store import Store

logger = logging.getLogger(__name__)

crashpoint = crashpoints.declare(
    "sandbox",
    "stop.written",
    "stop.done",
    "delete.written",
    "delete.done",
    "delete.failed",
    "settle.written",
    "settle.looked",
)

_T = TypeVar("_T")

# A call to the provider ends before the row's deadline, so that its worker still writes what came of it.
_SHARE_OF_DEADLINE = 0.8
_POLL_SECONDS = 0.1
# Parked sandboxes that this process knows without reading: far more than any cap of warm slots.
_REMEMBERED = 1_000
_SEEN: Mapping[InstanceState, Observed] = {
    InstanceState.RUNNING: Observed.RUNNING,
    InstanceState.STOPPED: Observed.STOPPED,
    InstanceState.ERROR: Observed.ERROR,
}


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds that a worker has for each kind of work; `look_again` is the pause before a second look for an instance
    that was not found."""

    create: float = 120.0
    start: float = 60.0
    stop: float = 30.0
    delete: float = 30.0
    look_again: float = 1.0


def disposition(row: Row) -> Disposition:
    """What a finished stop or delete came to."""
    if row.observed is Observed.GONE:
        return Disposition.DELETED
    if row.tenure is Tenure.ORPHAN:
        return Disposition.ORPHANED
    return Disposition.STOPPED


class Transitions:
    """Stop, delete, wait, and settle what a dead worker left. Creating and starting is in `starting`."""

    def __init__(
        self,
        store: Store,
        providers: Mapping[str, Provider],
        clock: Clock,
        deadlines: Deadlines,
        *,
        metrics: Metrics,
    ) -> None:
        self._store = store
        self._providers = providers
        self._clock = clock
        self.deadlines = deadlines
        self._metrics = metrics
        self._changed: dict[str, asyncio.Event] = {}
        self._parked: dict[Key, Row] = {}

    async def call(self, provider: str, deadline: float, operation: Callable[[Provider], Awaitable[_T]]) -> _T:
        """Call a provider within its share of a row's deadline. Raises `ProviderError`."""
        found = self._providers.get(provider)
        if found is None:
            raise ProviderUnavailable(f"provider {provider} is switched off")
        outcome = "cancelled"
        try:
            result = await within(deadline * _SHARE_OF_DEADLINE, self._clock, lambda: operation(found))
            outcome = "ok"
        except Exception as error:
            outcome = type(error).__name__
            raise
        finally:
            self._metrics.called(provider, outcome)
        return result

    async def move(self, before: Row, after: Row, **conditions: Any) -> Row | None:
        """`Store.move`, and wake who waits for this row in this process."""
        return self._told(await self._store.move(before, after, **conditions))

    async def attach(self, before: Row, after: Row) -> Row | None:
        """`Store.attach`, and wake who waits for this row in this process."""
        return self._told(await self._store.attach(before, after))

    def remembered(self, key: Key) -> Row | None:
        """The sandbox of a session as this process parked it, for once. It may have changed since: another process
        may have moved it, so only a compare-and-set may go by it."""
        return self._parked.pop(key, None)

    def _told(self, moved: Row | None) -> Row | None:
        if moved is not None and (waiting := self._changed.pop(moved.sandbox_id, None)):
            waiting.set()
        return moved

    async def begin(
        self,
        row: Row,
        observed: Observed,
        deadline: float,
        *,
        renewals: int | None = None,
        while_open: bool = False,
        **changes: Any,
    ) -> Row | None:
        """Become the worker of the row for `deadline` seconds; also to go on as its worker with a new deadline."""
        after = replace(row, observed=observed, worker=self._store.worker, **changes)
        return await self.move(row, after, deadline=deadline, renewals=renewals, while_open=while_open)

    async def wait(self, row: Row) -> None:
        """Return when the row changed or its worker's deadline has passed."""
        while True:
            changed = self._changed.setdefault(row.sandbox_id, asyncio.Event())
            now = await self._store.get(row.sandbox_id)
            if now is None or now.version != row.version or not now.in_transition:
                self._changed.pop(row.sandbox_id, None)
                return
            # Another process may be the one that changes it, so the event is not the only witness.
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_SECONDS):
                    await changed.wait()

    async def park(self, row: Row) -> Row | None:
        """Keep a running sandbox between turns; its warm slot is taken already."""
        parked = await self.move(row, replace(row, tenure=Tenure.PARKED))
        if parked is not None and parked.key is not None:
            self._parked.pop(parked.key, None)
            self._parked[parked.key] = parked
            if len(self._parked) > _REMEMBERED:
                del self._parked[next(iter(self._parked))]
        return parked

    async def stop(self, row: Row, *, renewals: int | None = None) -> Row | None:
        """Stop the instance and keep its disk. A stop that fails becomes a delete."""
        working = await self.begin(
            row, Observed.STOPPING, self.deadlines.stop, desired=Desired.STOPPED, renewals=renewals
        )
        if working is None:
            return None
        crashpoint("stop.written")
        try:
            await self.call(row.provider, self.deadlines.stop, lambda provider: provider.stop(row.reference))
        except InstanceNotFound:
            return await self._gone(working)
        except ProviderError as trouble:
            logger.warning("stop failed, deleting", extra=_about(row, error=str(trouble)))
            return await self.delete(replace(working, last_error=str(trouble)))
        crashpoint("stop.done")
        logger.info("sandbox stopped", extra=_about(row))
        return await self.move(working, _at_rest(working, Observed.STOPPED, Tenure.FREE))

    async def delete(self, row: Row, *, renewals: int | None = None) -> Row | None:
        """Delete the instance, whatever its state. What cannot be seen gone becomes an orphan."""
        working = await self.begin(
            row, Observed.DELETING, self.deadlines.delete, desired=Desired.GONE, renewals=renewals
        )
        if working is None:
            return None
        crashpoint("delete.written")
        try:
            await self.call(row.provider, self.deadlines.delete, lambda provider: provider.delete(row.reference))
        except ProviderError as trouble:
            crashpoint("delete.failed")
            logger.error("delete failed, sandbox is an orphan", extra=_about(row, error=str(trouble)))
            orphan = _at_rest(working, Observed.UNKNOWN, Tenure.ORPHAN)
            return await self.move(working, replace(orphan, last_error=str(trouble)))
        crashpoint("delete.done")
        return await self._gone(working)

    async def settle(self, row: Row) -> Row | None:
        """Take over from a worker whose deadline has passed: look what there is and write that."""
        working = await self.begin(row, row.observed, self.deadlines.start)
        if working is None:
            return None
        crashpoint("settle.written")
        logger.warning("worker is overdue, taking over", extra=_about(row, observed=row.observed, worker=row.worker))
        try:
            instance = await self.call(row.provider, self.deadlines.start, lambda provider: self._look(provider, row))
        except ProviderError as trouble:
            unknown = replace(_idle(working), observed=Observed.UNKNOWN, last_error=str(trouble))
            return await self.move(working, unknown)
        crashpoint("settle.looked")
        if instance is None:
            return await self._gone(working)
        seen = _SEEN.get(instance.state, Observed.UNKNOWN)
        found = replace(working, provider_id=instance.provider_id)
        if seen is Observed.STOPPED:
            return await self.move(working, _at_rest(found, seen, Tenure.FREE))
        return await self.move(working, replace(_idle(found), observed=seen))

    async def seen(self, row: Row, observed: Observed) -> Row | None:
        """Write that the instance was seen STOPPED or GONE though nobody of us made it so."""
        logger.warning("sandbox is not what it was", extra=_about(row, before=row.observed, now=observed))
        if observed is Observed.GONE:
            return await self._gone(row)
        return await self.move(row, _at_rest(row, observed, Tenure.FREE))

    async def _look(self, provider: Provider, row: Row) -> Instance | None:
        """The instance once it is in a state that lasts; None when it is not there at two looks, because a create that
        was under way when its worker died may show late."""
        missed = False
        while True:
            try:
                instance = await provider.get(row.reference)
            except InstanceNotFound:
                if missed:
                    return None
                missed = True
                await self._clock.sleep(self.deadlines.look_again)
                continue
            if instance.state.settled:
                return instance
            await self._clock.sleep(_POLL_SECONDS)

    async def _gone(self, row: Row) -> Row | None:
        logger.info("sandbox gone", extra=_about(row))
        tenure = Tenure.ORPHAN if row.tenure is Tenure.ORPHAN else Tenure.FREE
        return await self.move(row, _at_rest(row, Observed.GONE, tenure))


def _idle(row: Row) -> Row:
    """Nobody works on it, and nobody knows its daemon."""
    return replace(row, worker=None, how=None, token=None, url="", headers={})


def _at_rest(row: Row, observed: Observed, tenure: Tenure) -> Row:
    """Nobody holds it either; as it is now is as it shall stay."""
    desired = Desired.STOPPED if observed is Observed.STOPPED else Desired.GONE
    return replace(_idle(row), desired=desired, observed=observed, tenure=tenure, holder=None)


def _about(row: Row, **more: object) -> dict[str, object]:
    project, session = row.key or ("", "")
    return {"sandbox_id": row.sandbox_id, "project": project, "session": session, "provider": row.provider, **more}
