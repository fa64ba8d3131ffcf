"""Arithmetic of measurements. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

Figures = dict[str, float]


def percentile(values: Iterable[float], percent: float) -> float:
    """The smallest value that at least `percent` of all values do not exceed. Raises ValueError when there are none."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("a percentile of nothing")
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def latency(prefix: str, seconds: Iterable[float]) -> Figures:
    """p50 and p99 in milliseconds, named `<prefix>p50_ms` and `<prefix>p99_ms`."""
    ordered = sorted(seconds)
    return {f"{prefix}p{percent}_ms": percentile(ordered, percent) * 1000 for percent in (50, 99)}


def medians(runs: Sequence[Mapping[str, float]]) -> Figures:
    """The median of each figure over the runs that have it."""
    names = dict.fromkeys(name for run in runs for name in run)
    return {name: statistics.median([run[name] for run in runs if name in run]) for name in names}


def per_item(prefix: str, cpu_seconds: Mapping[str, float], items: int) -> Figures:
    """CPU time of each process per item in microseconds, named `<prefix><process>_us`."""
    return {f"{prefix}{name}_us": seconds / max(items, 1) * 1e6 for name, seconds in cpu_seconds.items()}


def rounded(value: float) -> float:
    """Four significant digits for numbers below 1,000, whole numbers above."""
    if not math.isfinite(value) or value == 0:
        return value
    if abs(value) >= 1000:
        return float(round(value))
    return round(value, 3 - math.floor(math.log10(abs(value))))
