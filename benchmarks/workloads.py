"""The workloads by name."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from benchmarks import append, control, fanout, replay, sessions, traffic, warm
from benchmarks.report import Report
from benchmarks.runs import Options, Say

WORKLOADS: dict[str, Callable[[Options, Say], Awaitable[Report]]] = {
    append.WORKLOAD: append.run,
    replay.WORKLOAD: replay.run,
    fanout.WORKLOAD: fanout.run,
    sessions.WORKLOAD: sessions.run,
    warm.WORKLOAD: warm.run,
    control.WORKLOAD: control.run,
    traffic.WORKLOAD: traffic.run,
}
