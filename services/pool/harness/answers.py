"""Reading what an agent answered, and what goes beside a request. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from services.pool.harness.port import HarnessError
from services.pool.harness.rpc import Message

ERROR_CHARACTERS = 300


def result_of(answer: Message, reason: str = "AGENT_PROTOCOL") -> Message:
    """The result of an answer. Raises its error as a `HarnessError` with `reason`."""
    if "error" in answer:
        code, message = error_of(answer)
        raise HarnessError(reason, f"the agent answered with error {code}: {message}")
    result = answer.get("result")
    if not isinstance(result, dict):
        raise HarnessError("AGENT_PROTOCOL", "the agent answered without a result")
    return result


def error_of(answer: Message) -> tuple[object, str]:
    """Code and words of the error of an answer; None and no words without one."""
    found = object_of(answer, "error")
    return found.get("code"), str(found.get("message", ""))[:ERROR_CHARACTERS]


def object_of(value: Message, name: str) -> Message:
    """The member of that name, empty unless it is an object."""
    found = value.get(name)
    return found if isinstance(found, dict) else {}


def meta(values: Mapping[str, Any]) -> Message:
    """The member `_meta` with these values; none without any."""
    return {"_meta": dict(values)} if values else {}
