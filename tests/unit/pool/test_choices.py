"""What an agent is asked when its session is opened: for a model, in either of two ways, and for servers."""

from __future__ import annotations

from typing import Any

import pytest

from services.pool.harness.choices import Login, check_servers, logins, model_calls, takes_instructions
from services.pool.harness.port import HarnessError, McpServer

MODELS = {"models": {"currentModelId": "small", "availableModels": [{"modelId": "small"}, {"modelId": "large"}]}}
LIST = [{"value": "small", "name": "Small"}, {"value": "large", "name": "Large"}]
GROUPS = [{"group": "a", "name": "A", "options": LIST[:1]}, {"group": "b", "name": "B", "options": LIST[1:]}]


SET_MODEL = ("session/set_model", {"modelId": "large"})
SET_OPTION = ("session/set_config_option", {"configId": "llm", "value": "large"})


def options(values: object) -> dict[str, Any]:
    """The answer of an agent with two choices."""
    mode = {"id": "mode", "category": "mode", "currentValue": "build", "options": [{"value": "large"}]}
    return {"configOptions": [mode, {"id": "llm", "category": "model", "currentValue": "small", "options": values}]}


@pytest.mark.parametrize(
    ("opened", "expected"),
    [
        (MODELS, [SET_MODEL]),
        (options(LIST), [SET_OPTION]),
        (options(GROUPS), [SET_OPTION]),
        ({**MODELS, **options(LIST)}, [SET_OPTION, SET_MODEL]),
    ],
)
def test_a_model_is_chosen_in_the_way_that_the_agent_offers(opened: dict[str, Any], expected: object) -> None:
    assert model_calls(opened, "large") == expected
    assert model_calls(opened, "small") == [], "it is in use"
    assert model_calls(opened, "") == []
    with pytest.raises(HarnessError, match="does not offer the model huge") as error:
        model_calls(opened, "huge")
    assert error.value.reason == "AGENT_START_FAILED"


@pytest.mark.parametrize(
    "opened", [{}, {"models": None, "configOptions": "x"}, {"configOptions": [5, {"category": "model"}]}]
)
def test_an_agent_without_a_choice_is_left_alone(opened: dict[str, Any]) -> None:
    assert model_calls(opened, "large") == []


PROGRAM = McpServer("files", command=["files"])
WEB = McpServer("issues", url="https://issues.example")


def test_servers_that_an_agent_cannot_reach_are_told() -> None:
    for capabilities in ({}, {"mcpCapabilities": {"http": False}}, {"mcpCapabilities": None}):
        check_servers([PROGRAM], capabilities)
        with pytest.raises(HarnessError, match="no MCP server over http, as issues is") as error:
            check_servers([PROGRAM, WEB], capabilities)
        assert error.value.reason == "AGENT_START_FAILED"
    check_servers([PROGRAM, WEB], {"mcpCapabilities": {"http": True}})


def test_who_takes_instructions_says_so() -> None:
    for meta in ({"hearth.dev/instructions": True}, {"claudeCode": {"promptQueueing": True}}):
        assert takes_instructions({"_meta": meta})
    for silent in ({}, {"_meta": None}, {"_meta": {"hearth.dev/instructions": "no"}}, {"_meta": {"claudeCode": None}}):
        assert not takes_instructions(silent)


def test_only_ways_to_log_in_by_a_variable_count() -> None:
    key = {"id": "key", "type": "env_var", "vars": [{"name": "A_KEY"}, {"name": "A_PLACE", "secret": False}]}
    methods = [{"id": "browser", "name": "Log in"}, key, {"type": "env_var"}, "nonsense"]
    assert logins({"authMethods": methods}) == [Login("key", ["A_KEY", "A_PLACE"])]
    assert logins({}) == []
    assert logins({"authMethods": None}) == []
