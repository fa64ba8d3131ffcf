"""What a run of random traffic must not show: judged from the stand-in's own journal and from the logs of sessions.

All of it is pure.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence

from benchmarks.figures import Figures
from benchmarks.traffic_people import Story
from benchmarks.warm_turns import ending_of
from hearth.types.v1 import event_pb2
from tests.support.daytona import Entry, Kind, checks

# A sandbox leaves its warm slot a moment before its first request shows in the journal.
SLACK_SECONDS = 1.0
# A fault explains what fails up to so long after it, and a clock may be read a moment late.
_LATE_SECONDS = 2.0

_PROVIDER = frozenset({"PROVIDER_UNAVAILABLE", "PROVIDER_REFUSED"})
_HARNESS = frozenset(
    {
        "AGENT_EXITED",
        "AGENT_OPEN_TIMEOUT",
        "AGENT_START_FAILED",
        "DAEMON_UNREACHABLE",
        "FIRST_RESPONSE_LIMIT",
        "HARNESS_STREAM_LOST",
        "HARNESS_UNREACHABLE",
        "SANDBOX_LOST",
    }
)
_ASKED = {"user": "stops", "killed": "kills"}


def parked(entries: Iterable[Entry], now: float, slack: float = SLACK_SECONDS) -> Sequence[checks.Span]:
    """When sandboxes ran without a turn, kept for the next one: from the call that tells Daytona of the parking to the
    next request that reaches into the sandbox (`slack` before it), or to the moment in which it runs no more."""
    entries = list(entries)
    told: dict[str, list[float]] = defaultdict(list)
    reached: dict[str, list[float]] = defaultdict(list)
    busy: dict[str, list[checks.Span]] = defaultdict(list)
    for spans in checks.traffic(entries, now).values():
        for span in spans:
            busy[span.sandbox].append(span)
    for entry in entries:
        if entry.kind == "call" and entry.data["call"] == "activity":
            told[entry.sandbox].append(entry.data["began"])
        elif entry.kind == "call" and entry.data["call"] == "preview":
            reached[entry.sandbox].append(entry.data["began"])
    found = []
    for whole in checks.charged(entries, now):
        at = whole.begin
        for begin in sorted(told[whole.sandbox]):
            # Told again because the first time failed, or in a turn that has begun since.
            in_turn = any(span.begin <= begin < span.end for span in busy[whole.sandbox])
            if begin < at or begin >= whole.end or in_turn:
                continue
            next_use = min((moment for moment in reached[whole.sandbox] if moment >= begin), default=None)
            at = whole.end if next_use is None else min(whole.end, next_use - slack)
            if at > begin:
                found.append(checks.Span(whole.sandbox, begin, at))
            at = max(at, begin)
    return found


def fired(counts: Mapping[str, int]) -> Figures:
    """How often each kind of fault fired, and how often a create left something behind without an answer."""
    figures: Figures = {f"fired_{kind.value}": counts.get(kind.value, 0) for kind in Kind}
    orphans = sum(counts.get(f"create/{kind.value}", 0) for kind in (Kind.LOSE_REPLY, Kind.FAIL_AFTER))
    return {**figures, "fired_orphan_on_create": orphans}


def outcomes(stories: Iterable[Story]) -> Figures:
    """How turns began and how they ended, and for failures why."""
    counts: Counter[str] = Counter()
    for story in stories:
        for event in story.log or ():
            kind = ending_of(event)
            if not kind:
                continue
            summary = getattr(event, kind).summary
            counts["turns"] += 1
            counts[f"ended_{kind.removeprefix('execution_')}"] += 1
            counts[f"how_{summary.how or 'never_asked'}"] += 1
            last = next((stage for stage in reversed(summary.stages) if stage.stage == "acquire" and stage.how), None)
            if last is not None:
                counts[f"acquire_{last.how}"] += 1
            if event.HasField("execution_failed"):
                counts[f"failed_{event.execution_failed.code}"] += 1
    return dict(sorted(counts.items()))


def check_story(story: Story, faults: Sequence[Entry]) -> list[str]:
    """What is wrong with the log of a session. `faults` are the journal's entries of that kind, of all sessions."""
    if story.log is None:
        return []
    begun: Counter[str] = Counter()
    started: dict[str, event_pb2.Event] = {}
    removed: set[str] = set()
    ended: Counter[str] = Counter()
    said: set[str] = set()
    problems = []
    for event in story.log:
        if event.HasField("execution_started"):
            begun[event.execution_started.input_id] += 1
            started[event.execution_id] = event
        elif event.HasField("input_removed"):
            removed.add(event.input_removed.input_id)
        elif kind := ending_of(event):
            ended[event.execution_id] += 1
            problems += _check_ending(story, kind, event, started.get(event.execution_id), said, faults)
        elif event.scope == event_pb2.EVENT_SCOPE_RUNNER:
            said.add(event.execution_id)
    for input_id in story.accepted:
        times = begun[input_id]
        if times > 1 or (times == 0) != (input_id in removed):
            problems.append(
                f"input {input_id} was started {times} times, {'' if input_id in removed else 'not '}removed"
            )
    unknown = set(begun) - set(story.accepted)
    problems += [f"input {input_id} was started and never accepted" for input_id in unknown]
    problems += [f"execution {one} has {ended[one]} endings" for one in started if ended[one] != 1]
    problems += [f"execution {one} ended and never started" for one in ended if one not in started]
    return [f"session {story.session}: {problem}" for problem in problems]


def _check_ending(
    story: Story,
    kind: str,
    event: event_pb2.Event,
    started: event_pb2.Event | None,
    said: set[str],
    faults: Sequence[Entry],
) -> list[str]:
    what = f"execution {event.execution_id}"
    match kind:
        case "execution_lost" | "execution_paused":
            return [f"{what} is {kind.removeprefix('execution_')}, which nothing explains"]
        case "execution_stopped":
            reason = event.execution_stopped.reason
            asked = getattr(story, _ASKED[reason]) if reason in _ASKED else 0
            return [] if asked else [f"{what} was stopped ({reason}), which nobody asked for"]
        case "execution_failed":
            failed = event.execution_failed
            problems = []
            if not _explained(story.session, failed.code, started, event, faults):
                problems.append(f"{what} failed with {failed.code}, which no fault explains: {failed.message}")
            if failed.summary.how == "warm" and event.execution_id not in said:
                problems.append(f"{what} failed with {failed.code} because its sandbox was kept: {failed.message}")
            return problems
    return []


def _explained(
    session: str, code: str, started: event_pb2.Event | None, ending: event_pb2.Event, faults: Sequence[Entry]
) -> bool:
    if started is None or code not in _PROVIDER | _HARNESS:
        return False
    begin = started.occurred_at.ToNanoseconds() / 1e9 - _LATE_SECONDS
    end = ending.occurred_at.ToNanoseconds() / 1e9 + _LATE_SECONDS
    # What is created has no name yet by which the journal could know it.
    return any(
        begin <= fault.wall <= end and (fault.session == session or not fault.session)
        for fault in faults
        if code in _HARNESS or fault.data["call"] != "preview"
    )
