"""The live agent sessions that this replica keeps between turns, one seat for each session.

An entry is BUSY from before its sandbox is acquired, so that two turns never build rivals; IDLE with a timer between
turns; AWAITING while its turn waits for people; DRAINING from the moment on at which somebody decided to close it.
Whoever closes it does so once, and others wait for that. Timers and closers act on the entry they mean, never on
whatever sits in its place now.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Coroutine
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Any, TypeAlias

from hearth.sandbox.v1 import sandbox_pb2
from hearth.secret import Secret
from services.chassis import crashpoints
from services.chassis.clock import Clock, Ids
from services.pool.credentials import NOTHING, Given
from services.pool.harness.port import HarnessError, HarnessSession
from services.pool.rows import Claim, Key

logger = logging.getLogger(__name__)
crashpoint = crashpoints.declare("pool", "close.begun")

Reason: TypeAlias = "sandbox_pb2.ReleaseReason.ValueType"


class EntryState(StrEnum):
    """What an entry is doing."""

    BUSY = "BUSY"
    IDLE = "IDLE"
    AWAITING = "AWAITING"
    DRAINING = "DRAINING"


@dataclasses.dataclass(slots=True)
class Live:
    """An agent session that was opened: what it runs in, what it was made from, what it knows.

    `fingerprint` is that of the spec that was applied, and `spec_digest` the SHA-256 of its bytes, which differs for
    more than what counts; `given` are the credentials it was started with.
    `last_execution_id` is the execution whose prompt it answered last. `processes` are those of the agent's own tree as
    it was when it was opened; None: not known.
    """

    harness: HarnessSession
    sandbox_id: str
    token: Secret
    agent: str
    provider: str
    spec_digest: bytes
    fingerprint: str
    given: Given = NOTHING
    processes: frozenset[int] | None = None
    last_execution_id: str | None = None


class Entry:
    """An agent session that is kept, or is to be. `live` is None while it is being built; `claim` is the last one it
    was acquired under."""

    __slots__ = (
        "claim",
        "closing",
        "entry_id",
        "expires_at",
        "key",
        "live",
        "lost",
        "seated",
        "state",
        "timer",
        "turns",
        "used",
        "used_at",
    )

    def __init__(self, key: Key, entry_id: str, claim: Claim) -> None:
        self.key = key
        self.entry_id = entry_id
        self.claim = claim
        self.state = EntryState.BUSY
        self.live: Live | None = None
        self.turns = 0
        self.used_at: datetime | None = None
        self.expires_at: datetime | None = None
        # Somebody else has its sandbox, or nobody: it must not be used again.
        self.lost = False
        # It may be kept. False for a turn that found no seat: that runs all the same.
        self.seated = False
        self.used = 0.0
        self.timer: asyncio.Task[Any] | None = None
        self.closing: asyncio.Task[Any] | None = None


Close = Callable[[Entry, Reason], Awaitable[None]]


class Entries:
    """All entries. `close` ends the agent session of one and gives its sandbox back; `gone` hears of each end."""

    def __init__(
        self,
        clock: Clock,
        ids: Ids,
        *,
        seats: int,
        close: Close,
        gone: Callable[[Key], object],
        spawn: Callable[[str, Coroutine[Any, Any, None]], asyncio.Task[Any]],
    ) -> None:
        self._clock = clock
        self._ids = ids
        self._seats = seats
        self._close = close
        self._gone = gone
        self._spawn = spawn
        self._entries: dict[Key, Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def all(self) -> list[Entry]:
        """Every entry, least recently used first."""
        return sorted(self._entries.values(), key=_by_use)

    def get(self, key: Key) -> Entry | None:
        """The entry of a session."""
        return self._entries.get(key)

    def checkout(self, key: Key) -> Entry | None:
        """The idle entry of a session, BUSY from now on; None when there is none."""
        entry = self._entries.get(key)
        if entry is None or entry.state is not EntryState.IDLE or entry.lost:
            return None
        self._stop_timer(entry)
        entry.state = EntryState.BUSY
        self._touch(entry)
        return entry

    async def reserve(self, key: Key, claim: Claim) -> Entry:
        """A new BUSY entry, made before its sandbox is acquired.

        Waits for what the session still has to be closed. With all seats taken the least recently used idle entry goes
        first; with none idle the entry gets no seat, and is there all the same: who kills the session must find it.
        """
        while (before := self._entries.get(key)) is not None:
            await self.close(before, sandbox_pb2.RELEASE_REASON_SESSION_INCOMPATIBLE)
        entry = self._entries[key] = Entry(key, self._ids.new(), claim)
        self._touch(entry)
        try:
            await self.seat(entry)
        except BaseException:
            # Nobody got it, so nobody would ever close it.
            entry.state = EntryState.DRAINING
            self._remove(entry)
            self._gone(key)
            raise
        return entry

    async def seat(self, entry: Entry) -> bool:
        """Give an entry a seat, if one is free or can be made free; whether it has one.

        A seat is free when what sat in it has been closed. Only idle entries are asked to go: a turn that runs, or
        waits for people, is never ended for another one.
        """
        while not entry.seated and not entry.lost and entry.closing is None:
            if sum(one.seated for one in self._entries.values()) < self._seats:
                entry.seated = True
                break
            idle = [one for one in self._entries.values() if one.seated and one.state is EntryState.IDLE]
            if not idle:
                break
            victim = min(idle, key=_by_use)
            logger.info("entry makes room", extra={"session": str(victim.key), "for": str(entry.key)})
            await self.close(victim, sandbox_pb2.RELEASE_REASON_CAPACITY)
        return entry.seated

    def keep(self, entry: Entry, window: float | None) -> bool:
        """Make a BUSY entry IDLE, for `window` seconds, or until it is used where that is None.

        False when it may not be kept: it has no seat, was lost, or is being closed.
        """
        if not entry.seated or entry.live is None or not self._may_change(entry, EntryState.BUSY):
            return False
        entry.state = EntryState.IDLE
        self._touch(entry)
        if window is not None:
            entry.expires_at = self._clock.now() + timedelta(seconds=window)
            entry.timer = self._spawn(f"warm window {entry.key}", self._expire(entry, window))
        return True

    def ask(self, entry: Entry) -> bool:
        """The turn of a BUSY entry waits for people from now on; False when it cannot: then nobody may be asked."""
        return self._change(entry, EntryState.BUSY, EntryState.AWAITING)

    def may_wait(self, entry: Entry, cap: int) -> bool:
        """Whether the turn of this entry may wait for people: at most `cap` do at a time on each provider. Those that
        wait already are never asked to make room."""
        provider = entry.live.provider if entry.live is not None else ""
        others = [one for one in self._entries.values() if one is not entry and one.state is EntryState.AWAITING]
        return sum(one.live is not None and one.live.provider == provider for one in others) < cap

    def drain(self, entry: Entry) -> bool:
        """The turn of a BUSY or AWAITING entry ends with its agent in the middle of it: from now on nothing is handed
        to that agent, and what is left is to close it. False when somebody closes it already, or has its sandbox."""
        return any(
            self._change(entry, before, EntryState.DRAINING) for before in (EntryState.AWAITING, EntryState.BUSY)
        )

    def go_on(self, entry: Entry) -> bool:
        """The turn of an AWAITING entry goes on; False when somebody decided otherwise, or went on with it already."""
        return self._change(entry, EntryState.AWAITING, EntryState.BUSY)

    async def close(self, entry: Entry, reason: Reason) -> None:
        """Close an entry and wait until it is closed; whoever comes second waits for the first."""
        if entry.closing is None:
            self._stop_timer(entry)
            entry.state = EntryState.DRAINING
            entry.closing = self._spawn(f"close {entry.key}", self._closed(entry, reason))
        # The closing goes on when the caller is cancelled: half a close would leave a sandbox that nobody knows.
        await asyncio.shield(entry.closing)

    async def close_idle(self, reason: Reason) -> None:
        """Close every idle entry, all at the same time."""
        idle = [entry for entry in self._entries.values() if entry.state is EntryState.IDLE]
        await asyncio.gather(*(self.close(entry, reason) for entry in idle))

    async def close_all(self) -> None:
        """Close every entry because the process ends: idle ones keep their disk, others may be in the middle of it."""
        found = list(self._entries.values())
        idle, in_flight = sandbox_pb2.RELEASE_REASON_SHUTDOWN_IDLE, sandbox_pb2.RELEASE_REASON_SHUTDOWN_IN_FLIGHT
        await asyncio.gather(
            *(self.close(entry, idle if entry.state is EntryState.IDLE else in_flight) for entry in found)
        )

    def drop(self, entry: Entry) -> None:
        """Forget an entry whose sandbox is somebody else's, or gone: nothing is released.

        Its agent session is closed all the same, which frees what it holds here; a daemon that answers to somebody else
        by now has another token, and does not hear of it.
        """
        entry.lost = True
        self._stop_timer(entry)
        if entry.closing is not None:
            return
        entry.state = EntryState.DRAINING
        self._remove(entry)
        self._gone(entry.key)
        if entry.live is not None:
            self._spawn(f"drop {entry.key}", _closed_quietly(entry.live.harness))

    def lost(self, entry: Entry) -> None:
        """The claim of an entry does not stand any more: an idle one is dropped, a busy one will not be kept."""
        entry.lost = True
        if entry.state is EntryState.IDLE:
            self.drop(entry)

    def claimed(self, entry: Entry) -> None:
        """The sandbox of a BUSY entry was acquired under a new claim: what became of the last one does not matter."""
        if entry.state is EntryState.BUSY and self._entries.get(entry.key) is entry:
            entry.lost = False

    async def _closed(self, entry: Entry, reason: Reason) -> None:
        crashpoint("close.begun")
        try:
            await self._close(entry, reason)
        except Exception:
            logger.exception("closing an entry failed", extra={"session": str(entry.key)})
        finally:
            self._remove(entry)
            if entry.key not in self._entries:
                self._gone(entry.key)

    async def _expire(self, entry: Entry, window: float) -> None:
        await self._clock.sleep(window)
        if entry.state is EntryState.IDLE and entry.closing is None:
            entry.timer = None
            logger.info("warm window is over", extra={"session": str(entry.key), "sandbox": _sandbox_of(entry)})
            await self.close(entry, sandbox_pb2.RELEASE_REASON_IDLE_EXPIRED)

    def _change(self, entry: Entry, before: EntryState, after: EntryState) -> bool:
        if not self._may_change(entry, before):
            return False
        entry.state = after
        self._touch(entry)
        return True

    def _may_change(self, entry: Entry, state: EntryState) -> bool:
        # What left its place is DRAINING, and stays so.
        return entry.state is state and not entry.lost

    def _remove(self, entry: Entry) -> None:
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]

    def _touch(self, entry: Entry) -> None:
        entry.used = self._clock.monotonic()
        entry.used_at = self._clock.now()

    def _stop_timer(self, entry: Entry) -> None:
        entry.expires_at = None
        if entry.timer is not None:
            entry.timer.cancel()
            entry.timer = None


async def _closed_quietly(harness: HarnessSession) -> None:
    try:
        await harness.close()
    except HarnessError as error:
        logger.info("dropped agent session was not closed", extra={"reason": error.reason})


def _by_use(entry: Entry) -> tuple[float, str]:
    return entry.used, entry.entry_id


def _sandbox_of(entry: Entry) -> str:
    return entry.live.sandbox_id if entry.live is not None else ""
