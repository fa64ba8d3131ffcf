"""What an agent lets its client choose when a session is opened, and what it can be given. Pure.

Agents offer their models among the options of a session, as the option of the category `model`, or as `models`; some do
both, and then serve only the first. An agent that offers neither has its model from elsewhere, and is left alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from services.pool.harness.port import HarnessError, McpServer

INSTRUCTIONS_META = "hearth.dev/instructions"

Json = Mapping[str, Any]
# A method, and its parameters without the session's id.
Call = tuple[str, Json]


@dataclasses.dataclass(frozen=True, slots=True)
class Login:
    """A way to log an agent in that needs nothing but these variables in its environment."""

    method: str
    variables: Sequence[str]


def logins(initialized: Json) -> Sequence[Login]:
    """Those that an agent offers, from its answer to `initialize`; ways that need a person are none."""
    return [
        Login(method["id"], [str(variable.get("name")) for variable in _objects(method.get("vars"))])
        for method in _objects(initialized.get("authMethods"))
        if method.get("type") == "env_var" and isinstance(method.get("id"), str)
    ]


def model_calls(opened: Json, model: str) -> Sequence[Call]:
    """The ways to have a session use `model`, from the answer to opening it, the best one first; none when there
    is nothing to do.

    Raises `HarnessError` when the agent offers models, and not this one.
    """
    calls: list[Call] = []
    if not model:
        return calls
    for option in _objects(opened.get("configOptions")):
        if option.get("category") == "model" and isinstance(option.get("id"), str):
            _check(model, [*_values(option.get("options"))])
            if option.get("currentValue") == model:
                return []
            calls.append(("session/set_config_option", {"configId": option["id"], "value": model}))
            break
    models = opened.get("models")
    if isinstance(models, dict):
        _check(model, [entry.get("modelId") for entry in _objects(models.get("availableModels"))])
        if models.get("currentModelId") == model:
            return []
        calls.append(("session/set_model", {"modelId": model}))
    return calls


def check_servers(servers: Sequence[McpServer], capabilities: Json) -> None:
    """Raises `HarnessError` when there is an MCP server that the agent says it cannot reach: it would work without the
    tools that it was to have, and nobody would know. Programs are for every agent to start."""
    reachable = capabilities.get("mcpCapabilities")
    for server in servers:
        if server.url and not (isinstance(reachable, dict) and reachable.get("http") is True):
            raise HarnessError("AGENT_START_FAILED", f"the agent takes no MCP server over http, as {server.name} is")


def takes_instructions(capabilities: Json) -> bool:
    """Whether an agent says that it takes instructions from what opens a session. The protocol has no word for them, so
    any other agent is told them with its first prompt."""
    meta = capabilities.get("_meta")
    # Ours, and that of the adapter of Claude Code, which takes them as an addition to its system prompt.
    return isinstance(meta, dict) and (meta.get(INSTRUCTIONS_META) is True or isinstance(meta.get("claudeCode"), dict))


def _check(model: str, offered: Sequence[object]) -> None:
    if model not in offered:
        raise HarnessError("AGENT_START_FAILED", f"the agent does not offer the model {model}")


def _values(options: object) -> Iterator[object]:
    """The values of a choice, whether they come in groups or not."""
    for option in _objects(options):
        if "options" in option:
            yield from _values(option["options"])
        else:
            yield option.get("value")


def _objects(values: object) -> list[Json]:
    return [value for value in values if isinstance(value, dict)] if isinstance(values, list) else []
