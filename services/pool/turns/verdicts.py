"""How a turn ended, from what the agent answered and what it was asked: a table, and the event that says it."""

from __future__ import annotations

import dataclasses
from enum import Enum

from hearth.types.v1 import content_pb2, event_pb2
from services.pool.harness.assembler import TurnEnd
from services.pool.harness.port import PromptResult

_REPORT_BYTES = 64 * 1024


class Asked(Enum):
    """Who asked the agent to end its turn."""

    NOBODY = ""
    USER = "user"
    # For an input that is to run instead.
    STEER = "steer"
    SHUTDOWN = "shutdown"


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """What came of a prompt. At most one of `result`, `code` and `paused` is given. None of them: the agent was asked
    to end its turn and did not answer in time, or was not asked anything at all."""

    asked: Asked
    result: PromptResult | None = None
    code: str = ""
    message: str = ""
    # The agent said, did or asked something.
    produced: bool = False
    # The interactions that the agent waits for, where nobody is waited for any longer in this turn.
    paused: tuple[str, ...] = ()


class Kind(Enum):
    """The ending."""

    COMPLETED = "completed"
    PAUSED = "paused"
    STOPPED = "stopped"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True, slots=True)
class Verdict:
    """An ending. `reason` is the finish reason, who stopped it, or the code of the failure; `output` says what becomes
    of messages and tool calls that are open. `answered`: the agent ended its turn itself, and can take another one."""

    kind: Kind
    reason: str
    output: TurnEnd
    answered: bool
    message: str = ""
    incomplete: str = ""
    interaction_ids: tuple[str, ...] = ()


def verdict(answer: Answer) -> Verdict:
    """How the turn ended. Once a Stop was accepted the agent's own answer decides."""
    if answer.code:
        lost = "part of the output was lost" if answer.code == "HARNESS_STREAM_LOST" else ""
        return Verdict(Kind.FAILED, answer.code, TurnEnd.TRUNCATED, False, answer.message, lost)
    if answer.paused:
        return Verdict(Kind.PAUSED, "", TurnEnd.PAUSED, False, interaction_ids=answer.paused)
    if answer.result is None:
        return Verdict(Kind.STOPPED, answer.asked.value, TurnEnd.STOPPED, False)
    reason = answer.result.stop_reason
    if reason == "cancelled" and answer.asked is not Asked.NOBODY:
        return Verdict(Kind.STOPPED, answer.asked.value, TurnEnd.STOPPED, True)
    if reason == "end_turn" and not answer.produced:
        return Verdict(
            Kind.FAILED, "EMPTY_TURN", TurnEnd.END, False, "the agent ended its turn without saying or doing anything"
        )
    return Verdict(Kind.COMPLETED, reason or "end_turn", TurnEnd.END, True)


@dataclasses.dataclass(frozen=True, slots=True)
class Summary:
    """What an ending tells of its turn."""

    stages: list[content_pb2.StageTiming]
    how: str
    sandbox_id: str
    usage: content_pb2.Usage | None = None
    report_json: str = ""


def ending(found: Verdict, summary: Summary, *, command_id: str = "") -> event_pb2.Event:
    """The event of an ending; its manifest is filled in by the writer."""
    event = event_pb2.Event(type=f"execution.{found.kind.value}")
    match found.kind:
        case Kind.COMPLETED:
            event.execution_completed.finish_reason = found.reason
            fill(event.execution_completed.summary, summary)
        case Kind.PAUSED:
            event.execution_paused.interaction_ids.extend(found.interaction_ids)
            fill(event.execution_paused.summary, summary)
        case Kind.STOPPED:
            event.execution_stopped.reason = found.reason
            event.execution_stopped.command_id = command_id
            fill(event.execution_stopped.summary, summary)
        case Kind.FAILED:
            event.execution_failed.code = found.reason
            event.execution_failed.message = found.message
            event.execution_failed.retryable = True
            fill(event.execution_failed.summary, summary)
            event.execution_failed.summary.manifest.incomplete = bool(found.incomplete)
            event.execution_failed.summary.manifest.incomplete_reason = found.incomplete
    return event


def fill(target: event_pb2.EndingSummary, summary: Summary) -> None:
    """Write a summary into an ending."""
    target.stages.extend(summary.stages)
    target.how = summary.how
    target.sandbox_id = summary.sandbox_id
    if summary.usage is not None:
        target.usage.CopyFrom(summary.usage)
    if len(summary.report_json.encode()) <= _REPORT_BYTES:
        target.agent_report_json = summary.report_json
