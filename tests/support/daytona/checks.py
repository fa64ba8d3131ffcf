"""What the journal proves. Entries in, facts out."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tests.support.daytona.journal import Entry
from tests.support.daytona.rules import CHARGED

# Prices of 2026-07, dollars per hour: a virtual processor, a GiB of memory, a GiB of disk.
_CPU, _MEMORY, _DISK = 0.0504, 0.0162, 0.000108


@dataclass(frozen=True, slots=True)
class Span:
    """From one time to another, in monotonic seconds, of a sandbox."""

    sandbox: str
    begin: float
    end: float


@dataclass(frozen=True, slots=True)
class Overlap:
    """Two sandboxes of one session that accepted harness traffic at one time."""

    session: str
    first: Span
    second: Span


@dataclass(frozen=True, slots=True)
class Usage:
    """Seconds in which sandboxes ran, and in which they were kept stopped."""

    running: float
    stopped: float

    def dollars(self, cpu: float = 1, memory: float = 1, disk: float = 3) -> float:
        """What that costs, for sandboxes of these resources."""
        on, kept = self.running / 3600, (self.running + self.stopped) / 3600
        return on * (cpu * _CPU + memory * _MEMORY) + kept * disk * _DISK


def traffic(entries: Iterable[Entry], now: float) -> Mapping[str, Sequence[Span]]:
    """For each session, the harness requests that a daemon accepted, by their begin. What goes on ends `now`.

    A request ends with the sandbox at the latest, even if its caller takes longer to hear of it.
    """
    entries = list(entries)
    ends: dict[str, list[float]] = defaultdict(list)
    for entry in entries:
        if entry.kind == "state" and entry.data["new"] in ("stopped", "archived", "destroyed"):
            ends[entry.sandbox].append(entry.at)
    found: dict[str, list[Span]] = defaultdict(list)
    for entry in entries:
        if entry.kind == "harness" and entry.data["harness"] and entry.data["accepted"] and entry.session:
            begin, end = entry.data["began"], now if entry.data["ended"] is None else entry.data["ended"]
            end = min([end, *(at for at in ends[entry.sandbox] if at >= begin)])
            found[entry.session].append(Span(entry.sandbox, begin, end))
    return {session: sorted(spans, key=lambda span: span.begin) for session, spans in found.items()}


def overlaps(entries: Iterable[Entry], now: float) -> Sequence[Overlap]:
    """Where two sandboxes of one session accepted harness traffic at once, or took turns.

    A sandbox that accepts traffic again after another one of the session did was accepting all the while.
    """
    found = []
    for session, spans in traffic(entries, now).items():
        whole: dict[str, Span] = {}
        for span in spans:
            had = whole.get(span.sandbox, span)
            whole[span.sandbox] = Span(span.sandbox, min(had.begin, span.begin), max(had.end, span.end))
        ordered = sorted(whole.values(), key=lambda span: span.begin)
        for index, first in enumerate(ordered):
            found += [Overlap(session, first, second) for second in ordered[index + 1 :] if second.begin < first.end]
    return found


def charged(entries: Iterable[Entry], now: float) -> Sequence[Span]:
    """When sandboxes ran and cost processor and memory. What goes on ends `now`."""
    began: dict[str, float] = {}
    spans = []
    for entry in entries:
        if entry.kind != "state":
            continue
        # In `error` and on its way to deletion it costs what it did before.
        runs = entry.data["new"] in CHARGED or (
            entry.data["new"] in ("error", "destroying") and entry.sandbox in began and entry.data["cause"] != "died"
        )
        if runs:
            began.setdefault(entry.sandbox, entry.at)
        elif entry.sandbox in began:
            spans.append(Span(entry.sandbox, began.pop(entry.sandbox), entry.at))
    return [*spans, *(Span(sandbox, at, now) for sandbox, at in began.items())]


def kept(entries: Iterable[Entry], now: float) -> Sequence[Span]:
    """From the creation of sandboxes to their destruction. What goes on ends `now`."""
    began: dict[str, float] = {}
    spans = []
    for entry in entries:
        if entry.kind == "state" and not entry.data["old"]:
            began[entry.sandbox] = entry.at
        elif entry.kind == "state" and entry.data["new"] == "destroyed":
            spans.append(Span(entry.sandbox, began.pop(entry.sandbox), entry.at))
    return [*spans, *(Span(sandbox, at, now) for sandbox, at in began.items())]


def usage(entries: Sequence[Entry], now: float) -> Usage:
    """Seconds over all sandboxes."""
    running = sum(span.end - span.begin for span in charged(entries, now))
    whole = sum(span.end - span.begin for span in kept(entries, now))
    return Usage(running, max(0.0, whole - running))


def idle(entries: Sequence[Entry], now: float, grace: float) -> Sequence[Span]:
    """When sandboxes ran but nobody used them: no harness request for more than `grace` seconds before and after.

    A turn holds a stream open; who parks a sandbox closes it. So this is the time parked, `grace` shorter at its begin
    and at its end.
    """
    busy: dict[str, list[Span]] = defaultdict(list)
    for spans in traffic(entries, now).values():
        for span in spans:
            busy[span.sandbox].append(span)
    found = []
    for whole in charged(entries, now):
        at = whole.begin
        for span in sorted(busy[whole.sandbox], key=lambda span: span.begin):
            if span.begin - at > 2 * grace:
                found.append(Span(whole.sandbox, at + grace, span.begin - grace))
            at = max(at, span.end)
        if whole.end - at > 2 * grace:
            found.append(Span(whole.sandbox, at + grace, whole.end - grace))
    return found


def most_at_once(spans: Sequence[Span]) -> int:
    """The greatest number of spans that share a moment."""
    # At one moment ends come before begins: what follows is not beside.
    steps = sorted([(span.begin, 1) for span in spans] + [(span.end, -1) for span in spans])
    most = at = 0
    for _, step in steps:
        at += step
        most = max(most, at)
    return most
