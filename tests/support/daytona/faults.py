"""Switches by which calls go wrong, each with the number of times it did."""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tests.support.daytona.delays import Chance

# Names of the calls that can go wrong. "preview" is a request to a port in a sandbox through the proxy.
LIFECYCLE = ("create", "start", "stop", "delete")
CALLS = (
    *LIFECYCLE,
    *("get", "list", "activity", "network", "preview_url", "toolbox_url", "labels", "volume", "secret", "snapshot"),
    *("execute", "session", "session_command", "session_logs", "upload", "download", "preview"),
)


class Kind(enum.Enum):
    """What goes wrong."""

    STATUS = "status"  # answered with `status`, nothing done
    DELAY = "delay"  # done and answered, `seconds` later
    DROP = "drop"  # the connection is cut, nothing done
    LOSE_REPLY = "lose_reply"  # done, and the connection cut in place of the reply; on create: an orphan
    FAIL_AFTER = "fail_after"  # done, and answered with `status`; on create: an orphan
    LIE = "lie"  # done; the reply names `state` as the sandbox's state, and `desired`, if given, as what it shall be
    STUCK = "stuck"  # the transition begins and does not end for `seconds` (0: until `release`)
    BREAK = "break"  # the transition ends in `error` (`recoverable` as said)


@dataclass(frozen=True, slots=True)
class Fault:
    """One switch. It is on for calls named `call` ("*": any) on sandboxes whose id or name is `sandbox` ("": any).

    `probability` per such call; at most `times` times (None: no bound); not for the first `skip` such calls.
    """

    call: str
    kind: Kind
    probability: float = 1.0
    times: int | None = None
    skip: int = 0
    sandbox: str = ""
    status: int = 500
    message: str = ""
    retry_after: float | None = None
    seconds: float = 0.0
    state: str = ""
    desired: str = ""
    recoverable: bool = True


@dataclass(slots=True)
class Switch:
    """A fault that was switched on, and how often it met a call and fired."""

    number: int
    fault: Fault
    met: int = 0
    fired: int = 0


class Faults:
    """The switches of a stand-in. Decisions come from the seed, in the order in which calls arrive."""

    def __init__(self, seed: int = 1) -> None:
        self._chance = Chance(seed)
        self._switches: list[Switch] = []
        self._next = 1
        self._fired: Counter[str] = Counter()

    def add(self, fault: Fault) -> Switch:
        """Switch it on; the returned switch counts."""
        if fault.call != "*" and fault.call not in CALLS:
            raise ValueError(f"there is no call {fault.call!r}; calls are {', '.join(CALLS)}")
        switch = Switch(self._next, fault)
        self._next += 1
        self._switches.append(switch)
        return switch

    def remove(self, switch: Switch) -> None:
        """Switch it off; its count stays in `counts`."""
        self._switches.remove(switch)

    def clear(self) -> None:
        """Switch all off. Transitions that are stuck stay so until they are released."""
        self._switches.clear()

    def seed(self, seed: int) -> None:
        """Begin a new series of decisions."""
        self._chance = Chance(seed)

    def everything(self, probability: float, *, seed: int = 1, seconds: float = 1.0) -> Sequence[Switch]:
        """Switch on every kind of fault, each on every call where it means something, with this probability.

        `seconds` is how long delays last and transitions are stuck.
        """
        self.seed(seed)
        return [self.add(fault) for fault in everything(probability, seconds)]

    def counts(self) -> Mapping[str, int]:
        """How often each kind fired, and each `call/kind`, since the start."""
        return dict(sorted(self._fired.items()))

    def decide(self, call: str, sandbox: Sequence[str] = ()) -> Fault | None:
        """The fault that this call meets, if any; `sandbox` are the id and the name of what it is about."""
        chosen: Switch | None = None
        for switch in self._switches:
            fault = switch.fault
            if fault.call not in ("*", call) or (fault.sandbox and fault.sandbox not in sandbox):
                continue
            if fault.kind in (Kind.STUCK, Kind.BREAK) and call not in LIFECYCLE:
                continue
            switch.met += 1
            if switch.met <= fault.skip or (fault.times is not None and switch.fired >= fault.times):
                continue
            if chosen is None and self._chance.happens(fault.probability):
                chosen = switch
        if chosen is None:
            return None
        chosen.fired += 1
        self._fired[chosen.fault.kind.value] += 1
        self._fired[f"{call}/{chosen.fault.kind.value}"] += 1
        return chosen.fault

    def shown(self) -> Sequence[Mapping[str, Any]]:
        """The switches that are on, as JSON values."""
        return [
            {**to_json(switch.fault), "number": switch.number, "met": switch.met, "fired": switch.fired}
            for switch in self._switches
        ]


def everything(probability: float, seconds: float) -> Sequence[Fault]:
    """One fault of each kind for each call where it means something."""
    found = []
    for call in CALLS:
        found += [
            Fault(call, Kind.STATUS, probability / 2, status=429, retry_after=min(1.0, seconds)),
            Fault(call, Kind.STATUS, probability / 2, status=500),
            Fault(call, Kind.DELAY, probability, seconds=seconds),
            Fault(call, Kind.DROP, probability),
            Fault(call, Kind.LOSE_REPLY, probability),
            Fault(call, Kind.FAIL_AFTER, probability, status=502),
        ]
        if call in LIFECYCLE:
            found += [
                Fault(call, Kind.STUCK, probability, seconds=seconds),
                Fault(call, Kind.BREAK, probability),
            ]
    lies = [Fault("get", Kind.LIE, probability / 2, state=state) for state in ("stopped", "unknown")]
    return [*found, *lies, Fault("list", Kind.LIE, probability, state="stopped")]


def to_json(fault: Fault) -> dict[str, Any]:
    """A fault as JSON values."""
    return {**asdict(fault), "kind": fault.kind.value}


def from_json(values: Mapping[str, Any]) -> Fault:
    """The fault that JSON values describe. Raises TypeError, KeyError or ValueError."""
    return Fault(**{**values, "kind": Kind(values["kind"])})
