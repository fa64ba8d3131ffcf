"""Claims: which of two holders may have the sandbox of a session, and when nobody needs it any more.

A claim is a holder's lease on the sandbox of a session. Claims are ordered; of two, the higher one stands. Everything
here is a decision over values: the caller reads and writes.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple


class Claim(NamedTuple):
    """Epoch of the session, then try within the epoch. Compares in that order."""

    epoch: int
    attempt: int


NO_CLAIM = Claim(0, 0)


@dataclass(frozen=True, slots=True)
class Standing:
    """What a session knows of its claims: the highest one seen, who made it, and up to which one they are closed."""

    claim: Claim
    holder: str
    closed: Claim

    @property
    def highest(self) -> Claim:
        """What a refused caller is told."""
        return max(self.claim, self.closed)


class Verdict(enum.Enum):
    """What an Acquire under some claim is, seen from the session."""

    NEWER = "newer"
    SAME = "same"
    FENCED = "fenced"
    CLOSED = "closed"


def judge(standing: Standing | None, claim: Claim, holder: str) -> Verdict:
    """May `holder` acquire under `claim`? None stands for a session that was never claimed.

    The same claim of another holder is fenced: two holders that believe in one claim are exactly what it must exclude.
    """
    if standing is None:
        return Verdict.NEWER
    if claim < standing.claim:
        return Verdict.FENCED
    if claim <= standing.closed:
        return Verdict.CLOSED
    if claim > standing.claim:
        return Verdict.NEWER
    return Verdict.SAME if holder == standing.holder else Verdict.FENCED


class RenewalVerdict(enum.Enum):
    """What became of a renewal."""

    OK = "ok"
    GONE = "gone"
    FENCED = "fenced"


def judge_renewal(standing: Standing | None, claim: Claim, *, renewed: bool) -> RenewalVerdict:
    """`renewed`: a running sandbox was found under exactly this claim and holder, and its counter moved."""
    if renewed:
        return RenewalVerdict.OK
    if standing is not None and standing.claim > claim:
        return RenewalVerdict.FENCED
    return RenewalVerdict.GONE


@dataclass(frozen=True, slots=True)
class LeaseLimits:
    """Seconds: how long a counter may stand still, and the longest gap between two readings that still proves it."""

    lease: float = 90.0
    gap: float = 10.0


@dataclass(frozen=True, slots=True)
class Reading:
    """The lease of one sandbox as it was read: its claim and how often it was renewed."""

    sandbox_id: str
    claim: Claim
    renewals: int


@dataclass(frozen=True, slots=True)
class Sighting:
    """A lease that an observer sees standing still, since when by the observer's own clock."""

    claim: Claim
    renewals: int
    since: float


@dataclass(frozen=True, slots=True)
class Leases:
    """What one observer has itself seen of all leases; `read_at` is None before the first reading."""

    read_at: float | None = None
    seen: Mapping[str, Sighting] = field(default_factory=lambda: MappingProxyType({}))


def observe(before: Leases, readings: Iterable[Reading], now: float, limits: LeaseLimits) -> Leases:
    """Add one reading of all leases at `now` (seconds of the observer's monotonic clock).

    After a gap in the readings nothing seen before it counts: a holder may have renewed in it, or could not, because
    what stopped this observer stopped the holder too.
    """
    continuous = before.read_at is not None and now - before.read_at <= limits.gap
    known = before.seen if continuous else {}
    seen = {}
    for reading in readings:
        last = known.get(reading.sandbox_id)
        still = last is not None and (last.claim, last.renewals) == (reading.claim, reading.renewals)
        seen[reading.sandbox_id] = Sighting(
            reading.claim, reading.renewals, last.since if last is not None and still else now
        )
    return Leases(now, seen)


def lapsed(leases: Leases, limits: LeaseLimits) -> dict[str, Sighting]:
    """The leases that nobody renewed for the whole lease, by sandbox id, as of the last reading."""
    if leases.read_at is None:
        return {}
    return {
        sandbox_id: sighting
        for sandbox_id, sighting in leases.seen.items()
        if leases.read_at - sighting.since >= limits.lease
    }
