"""Which faults a round has, in which order and how hard: a pure function of its seed."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass

PARTS = ("history", "relay", "postgres", "valkey")
PAIRS = tuple(itertools.combinations(PARTS, 2))

# Whose connections are cut: between a client and a service, or between a service and what it needs.
LINKS = ("producer-history", "producer-relay", "reader-relay", "relay-history", "history-postgres", "relay-valkey")


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong for `seconds`; `pick` chooses what else has to be chosen (a replica, a session)."""

    kind: str
    targets: tuple[str, ...] = ()
    seconds: float = 0.0
    pick: int = 0

    @property
    def name(self) -> str:
        """Kind and targets, as `--only` takes it."""
        return f"{self.kind}:{'+'.join(self.targets)}" if self.targets else self.kind

    def __str__(self) -> str:
        return f"{self.name} for {self.seconds:.1f} s"


@dataclass(frozen=True)
class Plan:
    """A round: how many replicas of each service, and what happens to them, one after the other."""

    seed: int
    histories: int
    relays: int
    faults: tuple[Fault, ...]


# Least and most seconds of each fault. A restore takes as long as it takes.
_CATALOGUE: dict[Fault, tuple[float, float]] = {
    **{Fault("kill", (part,)): (0.3, 3.0) for part in (*PARTS, "producer")},
    **{Fault("kill", pair): (0.3, 3.0) for pair in PAIRS},
    **{Fault("cut", (link,)): (1.0, 2.5) for link in LINKS},
    **{Fault("freeze", (part,)): (2.0, 6.0) for part in ("history", "relay")},
    Fault("flush"): (2.0, 3.0),
    Fault("disk-full"): (1.0, 2.0),
    Fault("restore"): (1.0, 3.0),
}
NAMES = tuple(fault.name for fault in _CATALOGUE)

_COPY = Fault("copy")


def plan(seed: int, *, only: Sequence[str] = (), histories: int = 0, relays: int = 0) -> Plan:
    """Every kind once, or those named in `only`, in an order of the seed; replicas by the seed where 0.

    A restore is put behind a copy, with other faults between them.
    """
    chance = random.Random(seed)
    wanted = [fault for fault in _CATALOGUE if not only or fault.name in only]
    unknown = set(only) - set(NAMES)
    if unknown:
        raise ValueError(f"no such fault: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    chance.shuffle(wanted)
    faults = []
    for fault in wanted:
        least, most = _CATALOGUE[fault]
        faults.append(Fault(fault.kind, fault.targets, chance.uniform(least, most), chance.randrange(1_000_000)))
    return Plan(
        seed,
        histories or 1 + seed % 2,
        relays or 1 + (seed + seed // 2) % 2,
        tuple(_with_copy(faults, chance)),
    )


def _with_copy(faults: list[Fault], chance: random.Random) -> list[Fault]:
    at = next((place for place, fault in enumerate(faults) if fault.kind == "restore"), None)
    if at is None:
        return faults
    restore = faults.pop(at)
    place = chance.randint(min(1, len(faults)), max(1, len(faults) - 1)) if faults else 0
    behind = min(len(faults), place + chance.randint(0, 3))
    return [*faults[:place], _COPY, *faults[place:behind], restore, *faults[behind:]]
