"""The metrics of a process: what each one means, and the instruments that count it.

A `Family` is a metric as people know it: its name, its unit, what it means, its labels. Every family is in a catalogue,
from which docs/metrics.md is written and against which the alert rules are checked. Labels hold states, reasons and
names of parts; never an id, a project or a session, so that their number stays small and they tell nothing of anybody.

Counting is a sum in a dict that the library reads when somebody asks, because it is done where every microsecond
counts. Only histograms are the library's own: they cost some microseconds each time, and are for what happens once for
a commit, a call or a turn. What must be looked up to be known, as the length of a queue in a table, is a reading: it is
looked up right before somebody is told.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import logging
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TypeAlias

from opentelemetry import metrics
from opentelemetry.metrics import CallbackOptions, Observation
from prometheus_client import CollectorRegistry

from services.chassis.errors import HearthError, as_hearth_error
from services.chassis.scopes import SCOPES

logger = logging.getLogger(__name__)

# What Prometheus reads of this process.
registry = CollectorRegistry()

# Upper bounds of histograms, in seconds: of what a computer does, and of what an agent or a person takes part in.
QUICK = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
LONG = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0, 7200.0)

_UNITS = {"s": "seconds", "By": "bytes"}
# Asking for one reading takes at most so long; a scrape waits for it.
_READ_SECONDS = 2.0
# Two who ask at the same time are told the same.
_FRESH_SECONDS = 0.2


class Kind(Enum):
    """How a metric behaves."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Of(Enum):
    """Whose number it is. That of a deployment is the same from every replica: take one of them, never the sum."""

    PROCESS = "process"
    DEPLOYMENT = "deployment"


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """One metric. `labels` are its labels, with those of their values that are known beforehand; `bounds` are the upper
    bounds of a histogram."""

    name: str
    kind: Kind
    unit: str
    help: str
    labels: Mapping[str, Sequence[str]]
    of: Of = Of.PROCESS
    bounds: Sequence[float] = ()

    @property
    def exposed(self) -> str:
        """Its name in Prometheus, of a histogram without `_bucket`, `_sum` and `_count`."""
        parts = [self.name.replace(".", "_")]
        if self.unit in _UNITS:
            parts.append(_UNITS[self.unit])
        if self.kind is Kind.COUNTER:
            parts.append("total")
        return "_".join(parts)

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its series in Prometheus."""
        if self.kind is Kind.HISTOGRAM:
            return tuple(f"{self.exposed}_{part}" for part in ("bucket", "sum", "count"))
        return (self.exposed,)

    @property
    def known(self) -> Iterator[tuple[str, ...]]:
        """All values of all labels, where they are known beforehand; else nothing."""
        return itertools.product(*self.labels.values())


_catalogue: dict[str, Family] = {}


def catalogue() -> list[Family]:
    """The families of the modules that are imported, by name."""
    return [_catalogue[name] for name in sorted(_catalogue)]


def _known(family: Family) -> Family:
    if family.name in _catalogue:
        raise ValueError(f"there are two metrics called {family.name}")
    _catalogue[family.name] = family
    return family


def counter(
    name: str, unit: str, meaning: str, *, of: Of = Of.PROCESS, labels: Mapping[str, Sequence[str]] | None = None
) -> Family:
    """A number that only grows, from the start of the process, or as long as the deployment lives."""
    return _known(Family(name, Kind.COUNTER, unit, meaning, labels or {}, of))


def gauge(
    name: str, unit: str, meaning: str, *, of: Of = Of.PROCESS, labels: Mapping[str, Sequence[str]] | None = None
) -> Family:
    """A number as it is now."""
    return _known(Family(name, Kind.GAUGE, unit, meaning, labels or {}, of))


def histogram(
    name: str, unit: str, meaning: str, bounds: Sequence[float], *, labels: Mapping[str, Sequence[str]] | None = None
) -> Family:
    """How often something had which size."""
    return _known(Family(name, Kind.HISTOGRAM, unit, meaning, labels or {}, bounds=bounds))


DEPENDENCY = gauge(
    "hearth.dependency.up",
    "1",
    "1 while a part that this service depends on answers, else 0; a relay with a 0 still serves what it can, any other"
    " service says that it does not serve",
    labels={"dependency": ()},
)
# Grows for good only when something is forgotten.
TASKS = gauge("hearth.tasks", "{task}", "tasks of asyncio in this process: calls, streams and work in the background")
CERTIFICATE_ENDS = gauge(
    "hearth.tls.certificate.ends",
    "s",
    "when the certificate that this process shows to its callers ends, in seconds since 1970; nothing without TLS",
)
READING_FAILURES = counter(
    "hearth.metrics.reading.failures",
    "{reading}",
    "times that a number which has to be looked up could not be: the series of it are missing meanwhile",
)
BROKEN = counter(
    "hearth.calls.broken",
    "{call}",
    "calls and streams that a defect ended, here or in a service called from here: INTERNAL, UNKNOWN or DATA_LOSS",
    labels={"rpc.method": [method.lstrip("/") for method in SCOPES]},
)
CALLS = histogram(
    "rpc.server.call.duration",
    "s",
    "calls with one answer, from their arrival to it; streams of answers are not in it, they stay open for hours",
    QUICK,
    labels={"rpc.method": (), "rpc.response.status_code": ()},
)


class Count:
    """The instrument of a counter. What is known beforehand begins at 0, so that its first is an increase."""

    def __init__(self, family: Family) -> None:
        self._labels = tuple(family.labels)
        self._values: dict[tuple[str, ...], float] = dict.fromkeys(family.known, 0)
        metrics.get_meter("hearth").create_observable_counter(
            family.name, callbacks=[self._observe], unit=family.unit, description=family.help
        )

    def add(self, amount: float, *labels: str) -> None:
        """Count; `labels` are the values of the family's labels, in their order."""
        self._values[labels] = self._values.get(labels, 0) + amount

    def __getitem__(self, labels: tuple[str, ...]) -> float:
        return self._values.get(labels, 0)

    def _observe(self, _: CallbackOptions) -> Iterable[Observation]:
        # In the thread of whoever exports: a copy is made in one step.
        return [
            Observation(value, dict(zip(self._labels, key, strict=True))) for key, value in self._values.copy().items()
        ]


class Sizes:
    """The instrument of a histogram."""

    def __init__(self, family: Family) -> None:
        self._labels = tuple(family.labels)
        self._record = (
            metrics.get_meter("hearth")
            .create_histogram(
                family.name,
                unit=family.unit,
                description=family.help,
                explicit_bucket_boundaries_advisory=family.bounds,
            )
            .record
        )

    def record(self, size: float, *labels: str) -> None:
        """Take one; `labels` are the values of the family's labels, in their order."""
        self._record(size, dict(zip(self._labels, labels, strict=True)))


# Of a family: its number, or one for each value of its only label, or for each pair of values of its two.
Values: TypeAlias = "float | Mapping[str, float] | Mapping[tuple[str, str], float]"
Reading: TypeAlias = Mapping[Family, Values]
Read: TypeAlias = "Callable[[], Reading | Awaitable[Reading]]"


class _Shown:
    """What was read last of one family."""

    def __init__(self, family: Family) -> None:
        self._family = family
        self._observations: Sequence[Observation] = ()
        meter = metrics.get_meter("hearth")
        make = meter.create_observable_counter if family.kind is Kind.COUNTER else meter.create_observable_gauge
        make(family.name, callbacks=[lambda _: self._observations], unit=family.unit, description=family.help)

    def show(self, values: Values | None) -> None:
        """Show these from now on; None: it is not known."""
        labels = tuple(self._family.labels)
        if values is None:
            self._observations = ()
        elif isinstance(values, Mapping):
            found: dict[tuple[str, ...], float] = dict.fromkeys(self._family.known, 0)
            found |= {key if isinstance(key, tuple) else (key,): value for key, value in values.items()}
            # OTLP takes no booleans.
            self._observations = [
                Observation(float(value), dict(zip(labels, key, strict=True))) for key, value in found.items()
            ]
        else:
            self._observations = [Observation(float(values))]


@dataclass(slots=True)
class _Watched:
    """Something that is looked up: where its numbers are shown, and when it was looked up last and well."""

    read: Read
    shown: Sequence[_Shown]
    every: float
    read_at: float = float("-inf")


class Readings:
    """What is looked up before somebody is told."""

    def __init__(self) -> None:
        self._reads: list[_Watched] = []
        self._shown: dict[Family, _Shown] = {}
        self._failures = Count(READING_FAILURES)
        self._lock = asyncio.Lock()
        self._read_at = float("-inf")

    def watch(self, read: Read, *families: Family, every: float = 0.0) -> None:
        """Show what `read` finds of these families, which is asked once in `every` seconds at most; one that fails, or
        takes too long, shows nothing of them."""
        shown = []
        for family in families:
            self._shown[family] = _Shown(family)
            shown.append(self._shown[family])
        self._reads.append(_Watched(read, shown, every))

    def watch_number(self, family: Family, read: Callable[[], Values]) -> None:
        """Show what `read` finds of one family."""
        self.watch(lambda: {family: read()}, family)

    async def refresh(self) -> None:
        """Look everything up, at the same time."""
        async with self._lock:
            now = asyncio.get_running_loop().time()
            if now - self._read_at >= _FRESH_SECONDS:
                due = [one for one in self._reads if now - one.read_at >= one.every]
                await asyncio.gather(*(self._look(one) for one in due))
                self._read_at = asyncio.get_running_loop().time()

    async def _look(self, one: _Watched) -> None:
        found: Reading = {}
        try:
            async with asyncio.timeout(_READ_SECONDS):
                result = one.read()
                found = await result if inspect.isawaitable(result) else result
                one.read_at = asyncio.get_running_loop().time()
        except Exception as error:
            known = HearthError if isinstance(error, TimeoutError) else as_hearth_error(error)
            self._failures.add(1)
            logger.log(
                logging.WARNING if known else logging.ERROR,
                "a metric cannot be read",
                extra={"cause": type(error).__name__},
                exc_info=None if known else error,
            )
        for shown in one.shown:
            shown.show(None)
        for family, values in found.items():
            self._shown[family].show(values)
