"""Metrics of sessions and turns: how turns start and end, what they wait for, what people ask of them, what is stuck.

Operators see some of the counters also by GetPoolStats, which is why those are kept here as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING

from hearth.types.v1 import reason_pb2
from services.chassis import metrics
from services.chassis.metrics import LONG, Count, Of, Reading, Readings, Sizes
from services.pool.rows import CommandOutcome, ExecutionState, Outcome
from services.pool.warm.entries import Entries, EntryState

if TYPE_CHECKING:
    from hearth.producer import ProducerStats
    from services.pool.upkeep_rows import UpkeepRows

# Of a turn that never got as far as an agent.
NO_AGENT = "none"
_HOW = ("warm", "restarted", "cold", NO_AGENT)
_OUTCOMES = tuple(str(outcome).lower() for outcome in Outcome)
_CODES = frozenset(name.removeprefix("REASON_") for name in reason_pb2.Reason.keys())  # noqa: SIM118 - an enum wrapper
_UNFINISHED = tuple(str(state).lower() for state in ExecutionState if state is not ExecutionState.TERMINAL)

TURNS = metrics.counter(
    "hearth.pool.turns",
    "{turn}",
    "turns that this process drove to their end, by how they found their agent and by outcome: `warm` = it was kept,"
    " `restarted` = its sandbox was, `cold` = neither, `none` = the turn ended before it had one",
    labels={"how": _HOW, "outcome": _OUTCOMES},
)
SETTLED = metrics.counter(
    "hearth.pool.executions.settled",
    "{execution}",
    "executions that ended, each counted once in the deployment, also those that no process drove any more",
    labels={"outcome": _OUTCOMES},
)
FAILED = metrics.counter(
    "hearth.pool.executions.failed",
    "{execution}",
    "executions that ended as `failed`, by the code of the failure; see the page of errors",
    labels={"code": ()},
)
MISSES = metrics.counter(
    "hearth.pool.misses",
    "{turn}",
    "turns that could not go on with a kept agent, by reason: `first-turn` and `not-kept` had none, every other reason"
    " is an agent that was kept and did not fit",
    labels={"reason": ("first-turn", "not-kept", "config", "continuity", "history", "instance")},
)
STAGES = metrics.histogram(
    "hearth.pool.stage.duration",
    "s",
    "the stages of turns; `how` says how a sandbox was got, or a session opened",
    LONG,
    labels={"stage": (), "how": ()},
)
COMMANDS = metrics.counter(
    "hearth.pool.commands",
    "{command}",
    "Stops and steers that were settled, by what came of them",
    labels={"kind": ("stop", "steer"), "outcome": ("stopped", "not_running", "superseded", "lost")},
)
STOP = metrics.histogram(
    "hearth.pool.stop.duration",
    "s",
    "from the acceptance of a Stop or a steer to its settlement, of those that found something to stop",
    LONG,
    labels={"kind": (), "outcome": ()},
)
TAKEOVERS = metrics.counter(
    "hearth.pool.takeovers",
    "{execution}",
    "executions that were taken from a driver that was gone, by what was done with them",
    labels={"decision": ("drive_again", "fail_start", "lose", "stop", "pause", "await_ending")},
)
ENTRIES = metrics.gauge(
    "hearth.pool.entries",
    "{entry}",
    "agents that this process keeps, by state; `idle` are the ones that are kept between turns",
    labels={"state": tuple(str(state).lower() for state in EntryState)},
)
DRIVING = metrics.gauge("hearth.pool.driving", "{session}", "sessions with a turn that this process drives")
EXECUTIONS = metrics.gauge(
    "hearth.pool.executions",
    "{execution}",
    "executions that have not ended, by state",
    of=Of.DEPLOYMENT,
    labels={"state": _UNFINISHED},
)
AGE = metrics.gauge(
    "hearth.pool.executions.age",
    "s",
    "the age of the oldest one in each state: since its start where it has started, else since its admission; 0 without"
    " one",
    of=Of.DEPLOYMENT,
    labels={"state": _UNFINISHED},
)
OPEN_COMMANDS = metrics.gauge(
    "hearth.pool.commands.open", "{command}", "Stops and steers that are not settled", of=Of.DEPLOYMENT
)
COMMAND_AGE = metrics.gauge(
    "hearth.pool.commands.open.age", "s", "the age of the oldest of them; 0 without one", of=Of.DEPLOYMENT
)
INPUTS = metrics.gauge("hearth.pool.inputs.waiting", "{input}", "messages that wait in queues", of=Of.DEPLOYMENT)
GATES = metrics.gauge(
    "hearth.pool.interactions.open", "{interaction}", "questions and approvals that wait for people", of=Of.DEPLOYMENT
)
OUTBOX = metrics.gauge(
    "hearth.pool.outbox.depth", "{fact}", "facts that are committed and not in history yet", of=Of.DEPLOYMENT
)
OUTBOX_AGE = metrics.gauge(
    "hearth.pool.outbox.age", "s", "the age of the oldest of them; 0 without one", of=Of.DEPLOYMENT
)
REFUSED = metrics.gauge(
    "hearth.pool.outbox.refused",
    "{fact}",
    "facts that history refused for good, which is a defect; they are kept for people to see",
    of=Of.DEPLOYMENT,
)
REPLICAS = metrics.gauge("hearth.pool.replicas", "{process}", "processes of the pool that are there", of=Of.DEPLOYMENT)
SPILLED = metrics.gauge(
    "hearth.pool.producer.spilled", "By", "output of turns that waits in files because history does not take it"
)
RESENT = metrics.counter("hearth.pool.producer.resent", "{event}", "events that were sent to history again")
LOSSES = metrics.counter(
    "hearth.pool.producer.losses",
    "{stream}",
    "times that the stream to history or to the relay was lost and opened again",
    labels={"to": ("history", "relay")},
)


class Metrics:
    """The instruments of one process."""

    def __init__(self) -> None:
        self.turns_by_how: Counter[str] = Counter()
        self.turns_by_outcome: Counter[str] = Counter()
        self.misses_by_reason: Counter[str] = Counter()
        self._turns = Count(TURNS)
        self._settled = Count(SETTLED)
        self._failed = Count(FAILED)
        self._misses = Count(MISSES)
        self._stages = Sizes(STAGES)
        self._commands = Count(COMMANDS)
        self._stop = Sizes(STOP)
        self._takeovers = Count(TAKEOVERS)

    def ended(self, how: str, outcome: str) -> None:
        """A turn ended; `how` is empty when it never reached an agent."""
        self.turns_by_outcome[outcome] += 1
        if how:
            self.turns_by_how[how] += 1
        self._turns.add(1, how or NO_AGENT, outcome)

    def settled(self, outcome: Outcome, code: str) -> None:
        """An execution ended; `code` is the reason of a failure, in whatever words its writer had."""
        self._settled.add(1, str(outcome).lower())
        if outcome is Outcome.FAILED:
            self._failed.add(1, code if code in _CODES else "OTHER")

    def missed(self, reason: str) -> None:
        """A turn could not go on with a live agent session."""
        self.misses_by_reason[reason] += 1
        self._misses.add(1, reason)

    def stage(self, name: str, how: str, seconds: float) -> None:
        """A stage of a turn ended."""
        self._stages.record(seconds, name, how)

    def command(self, kind: str, outcome: CommandOutcome, seconds: float | None = None) -> None:
        """A Stop or a steer was settled, so long after it was accepted if there was something to stop."""
        word = str(outcome).lower()
        self._commands.add(1, kind, word)
        if seconds is not None:
            self._stop.record(seconds, kind, word)

    def taken_over(self, decision: str) -> None:
        """An execution was taken from a driver that was gone."""
        self._takeovers.add(1, decision.lower())


def watch(
    readings: Readings,
    *,
    entries: Entries,
    driving: Callable[[], int],
    producer: Callable[[], ProducerStats],
    rows: UpkeepRows,
) -> None:
    """Show what this process has in hands, and what waits by the rows."""

    async def figures() -> Reading:
        found = await rows.figures()
        return {
            EXECUTIONS: {state.lower(): count for state, (count, _) in found.executions.items()},
            AGE: {state.lower(): seconds for state, (_, seconds) in found.executions.items()},
            OPEN_COMMANDS: found.commands,
            COMMAND_AGE: found.command_seconds,
            INPUTS: found.inputs,
            GATES: found.gates,
            OUTBOX: found.outbox,
            OUTBOX_AGE: found.outbox_seconds,
            REFUSED: found.refused,
            REPLICAS: found.replicas,
        }

    def sent() -> Reading:
        stats = producer()
        return {
            SPILLED: stats.parked_bytes,
            RESENT: stats.events_resent,
            LOSSES: {"history": stats.append_losses, "relay": stats.publish_losses},
        }

    readings.watch_number(ENTRIES, lambda: Counter(str(entry.state).lower() for entry in entries.all()))
    readings.watch_number(DRIVING, driving)
    readings.watch(sent, SPILLED, RESENT, LOSSES)
    readings.watch(
        figures,
        *(EXECUTIONS, AGE, OPEN_COMMANDS, COMMAND_AGE, INPUTS, GATES, OUTBOX, OUTBOX_AGE, REFUSED, REPLICAS),
    )
