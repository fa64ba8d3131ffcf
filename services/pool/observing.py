"""What one replica makes of the beats of the others: which of them are dead, and which executions they have forgotten.

An observer trusts nothing but its own readings and its own monotonic clock. A counter that it has itself seen standing
still for long enough, with no gap in its readings, belongs to a process that is dead or cut off; after a gap nothing
that was seen before it counts, because what kept this observer from reading may have kept the others from beating.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from services.pool.rows import Key

# Beats that must leave out an execution, all of them made after the one with which it was first missed.
UNLISTED_BEATS = 2


@dataclass(frozen=True, slots=True)
class BeatLimits:
    """Seconds: how long a counter stands still before its replica counts as dead, how long a holder without any row
    does, and the longest gap between two readings."""

    dead: float = 45.0
    absent: float = 15.0
    gap: float = 10.0


@dataclass(frozen=True, slots=True)
class Beat:
    """A replica as it was read: its counter, and the sessions that it says it drives."""

    beats: int
    driving: frozenset[Key] = frozenset()


class Driven(NamedTuple):
    """An execution that a replica picked up, and that nothing has ended yet."""

    key: Key
    execution_id: str
    epoch: int
    driver: str


@dataclass(frozen=True, slots=True)
class Reading:
    """One reading of everything, begun and ended at these seconds of the observer's monotonic clock."""

    began: float
    ended: float
    beats: Mapping[str, Beat]
    driven: Iterable[Driven] = ()


@dataclass(frozen=True, slots=True)
class Still:
    """A counter that has not moved since then; `beats` is None for a holder that has no row."""

    beats: int | None
    since: float


@dataclass(frozen=True, slots=True)
class Missed:
    """An execution that its driver did not list: the counter of the last reading, and how often it moved meanwhile."""

    beats: int
    moved: int = 0


@dataclass(frozen=True, slots=True)
class Seen:
    """What an observer has itself seen. `read_at` is when its last reading began, None before the first."""

    read_at: float | None = None
    holders: Mapping[str, Still] = field(default_factory=lambda: MappingProxyType({}))
    missed: Mapping[Driven, Missed] = field(default_factory=lambda: MappingProxyType({}))


def observe(before: Seen, reading: Reading, limits: BeatLimits) -> Seen:
    """Add one reading to what was seen."""
    # From the beginning of the one to the end of the other: that long nothing may have been seen.
    continuous = before.read_at is not None and reading.ended - before.read_at <= limits.gap
    known = before if continuous else Seen()
    driven = list(reading.driven)
    counters: dict[str, int | None] = {one.driver: None for one in driven}
    counters.update({holder: beat.beats for holder, beat in reading.beats.items()})
    holders = {}
    for holder, beats in counters.items():
        last = known.holders.get(holder)
        # It stood still since some moment within the first of these readings: the latest one is taken.
        holders[holder] = last if last is not None and last.beats == beats else Still(beats, reading.ended)
    missed = {}
    for one in driven:
        beat = reading.beats.get(one.driver)
        if beat is not None and one.key not in beat.driving:
            missed[one] = _missed(known.missed.get(one), beat.beats)
    return Seen(reading.began, holders, missed)


def dead(seen: Seen, limits: BeatLimits) -> dict[str, int | None]:
    """Holders that are dead as of the last reading, with the counter at which they stood."""
    if seen.read_at is None:
        return {}
    return {
        holder: still.beats
        for holder, still in seen.holders.items()
        if seen.read_at - still.since >= (limits.dead if still.beats is not None else limits.absent)
    }


def forgotten(seen: Seen) -> list[Driven]:
    """Executions that their living drivers do not drive: they count as those of a dead one."""
    return [one for one, missed in seen.missed.items() if missed.moved >= UNLISTED_BEATS]


def _missed(last: Missed | None, beats: int) -> Missed:
    if last is None:
        return Missed(beats)
    return Missed(beats, last.moved + (beats != last.beats))
