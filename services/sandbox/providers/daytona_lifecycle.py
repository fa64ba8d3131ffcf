"""Getting a sandbox at Daytona to be created, running, stopped or gone, and seeing it so.

What was asked for is then watched by looks of our own, which survive an API that answers 429 or 5xx; what was asked for
in vain, because the state was another one just then, is asked for again. Times named `until` are of the clock's
monotonic time.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from services.chassis.clock import Clock
from services.sandbox.providers.daytona_options import DaytonaOptions
from services.sandbox.providers.daytona_states import Step, detail, instance_state, to_start, to_stop
from services.sandbox.providers.daytona_values import Making, Seen
from services.sandbox.providers.port import (
    InstanceNotFound,
    InstanceState,
    NameTaken,
    ProviderError,
    ProviderRefused,
    ProviderUnavailable,
)

if TYPE_CHECKING:
    from services.sandbox.providers.daytona_sdk import Sdk

logger = logging.getLogger(__name__)

_SURE_SECONDS = 0.05
_GROWTH = 1.5
_CLOSE_SECONDS = 3.0


@dataclass(slots=True)
class _Removal:
    """The search for what a create that was given up may leave; `deleting` once something was found."""

    attempt: str
    task: asyncio.Task[None] | None = None
    deleting: bool = False


class Lifecycle:
    """Changes of the state of sandboxes. Raises the errors of the port."""

    def __init__(self, sdk: Sdk, options: DaytonaOptions, clock: Clock) -> None:
        self._sdk = sdk
        self._options = options
        self._clock = clock
        self._removals: dict[str, _Removal] = {}

    def until(self, seconds: float) -> float:
        """The moment in so many seconds."""
        return self._clock.monotonic() + seconds

    async def look(self, reference: str, until: float, *, sure: bool = False) -> Seen:
        """The sandbox now. Waits out an API that does not answer. Raises `InstanceNotFound` when told so twice (once
        if `sure`: look-ups at Daytona are cached)."""
        pause, missed = self._options.first_pause, sure
        while True:
            try:
                seen = await self._sdk.get(reference)
                if not seen.destroyed:
                    return seen
                raise InstanceNotFound(f"{reference} is destroyed")
            except InstanceNotFound:
                if missed:
                    raise
                missed = True
                await self._clock.sleep(_SURE_SECONDS)
            except ProviderUnavailable as trouble:
                await self._pause(max(pause, trouble.retry_after or 0.0), until, trouble)
                pause = self._longer(pause)

    async def create(self, making: Making) -> Seen:
        """Create it and see it run; what is left of one that fails is removed. Raises `NameTaken` for what another
        call made. `making` carries the label of its attempt."""
        attempt = Seen("", making.name, "", labels=making.labels).attempt
        await self._end_removal(making.name)
        try:
            return await self._create(making, attempt, self.until(self._options.create_seconds))
        except NameTaken:
            raise
        except BaseException as trouble:
            # Of what was sent away with a time to come back, or refused and then not found, nothing was made.
            if not _sent_away(trouble) and not isinstance(trouble, ProviderRefused):
                self.remove_late(making.name, attempt)
            raise

    async def run(self, reference: str, until: float) -> Seen:
        """Start it if need be, and see it run."""
        refused: ProviderRefused | None = None
        watch = self._watch(reference, until)
        # What was last heard to be stopped is asked to start at once: a look costs as much as the mistake.
        known = self._sdk.known(reference)
        seen = known if known is not None and to_start(known) is Step.ASK else await watch.next()
        while True:
            step = to_start(seen)
            if step is Step.DONE:
                return seen
            if refused is not None and step is Step.ASK:
                raise refused
            refused, after = await self._take(step, seen, self._sdk.start, until)
            if after is not None and to_start(after) is Step.DONE:
                return after
            seen = await watch.next()

    async def stop(self, reference: str, until: float) -> None:
        """Stop it if need be, and see it stopped: twice, since one answer may come from before."""
        refused: ProviderRefused | None = None
        sure = False
        watch = self._watch(reference, until)
        while True:
            seen = await watch.next()
            step = to_stop(seen)
            if step is Step.DONE and sure:
                return
            if refused is not None and step is Step.ASK:
                raise refused
            refused, after = await self._take(step, seen, self._sdk.stop, until)
            sure = step is Step.DONE or (after is not None and to_stop(after) is Step.DONE)

    async def delete(self, reference: str, until: float) -> None:
        """Delete it, and see it gone."""
        accepted = False
        pause = self._options.first_pause
        while True:
            waiting = ProviderUnavailable(f"{reference} is not seen gone")
            try:
                seen = await self.look(reference, until, sure=accepted)
                # A name is given up when the deletion begins, so from now on only the id shows how it goes.
                reference = seen.id
                if instance_state(seen) is not InstanceState.DELETING:
                    await self._sdk.delete(seen.id)
                    accepted = True
            except InstanceNotFound:
                return
            except ProviderUnavailable as trouble:
                waiting = trouble
            await self._pause(max(pause, waiting.retry_after or 0.0), until, waiting)
            pause = self._longer(pause)

    def remove_late(self, name: str, attempt: str) -> asyncio.Task[None]:
        """Remove, beside everything else, what a create that was given up may have left or may still leave."""
        removal = _Removal(attempt)
        removal.task = asyncio.create_task(self._remove_late(name, removal), name=f"remove late {name}")
        self._removals[name] = removal
        removal.task.add_done_callback(lambda _: self._forget(name, removal))
        return removal.task

    async def close(self) -> None:
        """Give removals that are under way a moment to end."""
        tasks = [removal.task for removal in self._removals.values() if removal.task is not None]
        if not tasks:
            return
        await asyncio.wait(tasks, timeout=_CLOSE_SECONDS)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _create(self, making: Making, attempt: str, until: float) -> Seen:
        """Create, and if it is not sure what came of it, look."""
        try:
            seen = await self._sdk.create(making, self._slice(until))
        except ProviderError as trouble:
            if _sent_away(trouble):
                raise
            try:
                seen = await self.look(making.name, until)
            except InstanceNotFound:
                if isinstance(trouble, NameTaken):
                    raise ProviderUnavailable(f"{trouble}; it is not there") from None
                raise trouble from None
            if seen.attempt != attempt:
                raise NameTaken(f"{making.name} exists") from None
            if to_start(seen) is Step.BROKEN:
                raise ProviderError(f"{trouble} ({detail(seen)})") from None
            logger.info("create went on without an answer", extra={"sandbox": making.name, "error": str(trouble)})
        return seen if to_start(seen) is Step.DONE else await self.run(seen.id, until)

    async def _take(
        self, step: Step, seen: Seen, ask: Callable[[str, float], Awaitable[Seen]], until: float
    ) -> tuple[ProviderRefused | None, Seen | None]:
        """Do one step. Returns a refusal that may have been but a clash of states, and what the SDK saw in the end."""
        if step is Step.GONE:
            raise InstanceNotFound(f"{seen.name} is destroyed")
        if step is Step.BROKEN:
            raise ProviderError(f"{seen.name} is in error: {detail(seen)}")
        if step is Step.ASK:
            try:
                return None, await ask(seen.id, self._slice(until))
            except ProviderUnavailable as trouble:
                await self._pause(trouble.retry_after or self._options.first_pause, until, trouble)
            except ProviderRefused as refusal:
                return refusal, None
            except InstanceNotFound:
                raise
            except ProviderError as trouble:
                # Among others the error state that the SDK saw while it waited; the next look tells.
                logger.info("asked in vain", extra={"sandbox": seen.name, "error": str(trouble)})
        return None, None

    async def _remove_late(self, name: str, removal: _Removal) -> None:
        until = self.until(self._options.clean_up_seconds)
        pause = self._options.first_pause
        try:
            while self._clock.monotonic() < until:
                with suppress(InstanceNotFound):
                    seen = await self.look(name, until, sure=True)
                    if seen.attempt == removal.attempt:
                        removal.deleting = True
                        await self.delete(seen.id, self.until(self._options.delete_seconds))
                        logger.info("removed what a create had left", extra={"sandbox": name})
                    return
                await self._clock.sleep(pause)
                pause = self._longer(pause)
        except ProviderError as trouble:
            # The reconciler finds it by its labels.
            logger.error("what a create may have left is not removed", extra={"sandbox": name, "error": str(trouble)})

    async def _end_removal(self, name: str) -> None:
        """Before a name is used again: nothing may be removed under it any more. What comes late is then found as a
        name that is taken."""
        removal = self._removals.get(name)
        if removal is None or removal.task is None:
            return
        if not removal.deleting:
            removal.task.cancel()
        await asyncio.wait([removal.task])

    def _forget(self, name: str, removal: _Removal) -> None:
        if self._removals.get(name) is removal:
            del self._removals[name]

    def _watch(self, reference: str, until: float) -> _Watch:
        return _Watch(self, self._clock, self._options, reference, until)

    async def _pause(self, seconds: float, until: float, trouble: ProviderUnavailable) -> None:
        """Sleep; raise `trouble` when that would end after `until`."""
        if self._clock.monotonic() + seconds > until:
            raise trouble
        await self._clock.sleep(seconds)

    def _longer(self, pause: float) -> float:
        return min(pause * _GROWTH, self._options.longest_pause)

    def _slice(self, until: float) -> float:
        """How long the SDK may wait before we look ourselves."""
        return max(1.0, min(self._options.slice_seconds, until - self._clock.monotonic()))


class _Watch:
    """Looks at one sandbox, with growing pauses while nothing changes."""

    def __init__(
        self, lifecycle: Lifecycle, clock: Clock, options: DaytonaOptions, reference: str, until: float
    ) -> None:
        self._lifecycle = lifecycle
        self._clock = clock
        self._options = options
        self._reference = reference
        self._until = until
        self._pause = options.first_pause / 2
        self._last: Seen | None = None

    async def next(self) -> Seen:
        """The next look. Raises `ProviderUnavailable` when the time is up."""
        if self._last is not None and self._clock.monotonic() >= self._until:
            raise ProviderUnavailable(f"{self._last.name} stays {self._last.state}")
        seen = await self._lifecycle.look(self._reference, self._until)
        self._reference = seen.id
        if self._last is not None and (self._last.state, self._last.desired) == (seen.state, seen.desired):
            await self._clock.sleep(self._pause)
            self._pause = min(self._pause * _GROWTH, self._options.longest_pause)
            seen = await self._lifecycle.look(self._reference, self._until)
        self._last = seen
        return seen


def _sent_away(trouble: BaseException) -> bool:
    """Whether the rate limit told when to come again: then nothing was done."""
    return isinstance(trouble, ProviderUnavailable) and trouble.throttled and trouble.retry_after is not None
