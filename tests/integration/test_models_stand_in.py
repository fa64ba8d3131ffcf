"""The stand-in of models says what its script says in each of the three APIs, streamed or whole, and logs who asks."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from tests.support.models.process import Models
from tests.support.models.server import serving
from tests.support.waiting import eventually

Json = dict[str, Any]

PARAMETERS = {"type": "object", "properties": {"command": {"type": "string"}}}
CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
TOOLS: dict[str, list[Json]] = {
    CHAT: [{"type": "function", "function": {"name": "bash", "parameters": PARAMETERS}}],
    RESPONSES: [{"type": "function", "name": "bash", "parameters": PARAMETERS}],
    MESSAGES: [{"name": "bash", "input_schema": PARAMETERS}],
}
EVERY = pytest.mark.parametrize("api", TOOLS)


@pytest_asyncio.fixture
async def stand_in() -> AsyncIterator[Models]:
    async with serving() as url:
        yield Models(url)


def body(api: str, *said: str, stream: bool = False, tools: bool = True) -> Json:
    """A request with these messages of a user, each but the last one answered."""
    turns: list[Json] = []
    for text in said:
        turns += [{"role": "user", "content": text}, {"role": "assistant", "content": "well"}]
    asked: Json = {"model": "standin-1", "stream": stream, "input" if api == RESPONSES else "messages": turns[:-1]}
    return asked | ({"tools": TOOLS[api]} if tools else {})


async def post(stand_in: Models, api: str, asked: Json, name: str = "me") -> tuple[int, str]:
    """The status and the text of the answer."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(stand_in.base(name) + api, json=asked) as response,
    ):
        return response.status, await response.text()


def events(text: str) -> list[Json]:
    """The data of the server-sent events of an answer."""
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def said_in(api: str, answer: str, *, stream: bool) -> str:
    """The words of an answer."""
    if api == CHAT:
        choices = [choice for found in _all(answer, stream) for choice in found["choices"]]
        return "".join(choice.get("delta", choice.get("message", {})).get("content") or "" for choice in choices)
    if stream:
        deltas = [found.get("delta") for found in events(answer) if found["type"].endswith("delta")]
        return "".join(delta if isinstance(delta, str) else (delta or {}).get("text", "") for delta in deltas)
    whole: Json = json.loads(answer)
    content = whole["output"][0]["content"] if api == RESPONSES else whole["content"]
    return "".join(part.get("text", "") for part in content)


def _all(answer: str, stream: bool) -> list[Json]:
    return events(answer) if stream else [json.loads(answer)]


@EVERY
@pytest.mark.parametrize("stream", [True, False])
async def test_words_are_said(stand_in: Models, api: str, stream: bool) -> None:
    status, answer = await post(stand_in, api, body(api, "say: hello there, Ada", stream=stream))
    assert status == 200
    assert said_in(api, answer, stream=stream) == "hello there, Ada"


@EVERY
async def test_all_that_people_said_is_known_and_what_agents_add_is_not(stand_in: Models, api: str) -> None:
    asked = body(api, "I am Ada.", "<system-reminder>be\nquick</system-reminder>", "more\n\nrecall:", stream=True)
    _, answer = await post(stand_in, api, asked)
    assert said_in(api, answer, stream=True) == "I am Ada. | more\n\nrecall:"


@EVERY
@pytest.mark.parametrize("stream", [True, False])
async def test_a_tool_is_called_with_arguments_of_its_own_names(stand_in: Models, api: str, stream: bool) -> None:
    _, answer = await post(stand_in, api, body(api, "run: echo 'a b'", stream=stream))
    assert json.dumps(json.dumps({"command": "echo 'a b'"})) in answer or '{"command": "echo \'a b\'"}' in answer
    assert "bash" in answer


@EVERY
async def test_the_script_goes_on_behind_a_result(stand_in: Models, api: str) -> None:
    asked = body(api, "run: echo 1\nsay: between\nrun: echo 2")
    result: dict[str, Json] = {
        CHAT: {"role": "tool", "tool_call_id": "c", "content": "one"},
        RESPONSES: {"type": "function_call_output", "call_id": "c", "output": "one"},
        MESSAGES: {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "one"}]},
    }
    turns = asked["input" if api == RESPONSES else "messages"]
    turns.append(result[api])
    _, answer = await post(stand_in, api, asked)
    assert "between" in answer
    assert "echo 2" in answer
    turns.append(result[api])
    asked["stream"] = True
    _, answer = await post(stand_in, api, asked)
    assert said_in(api, answer, stream=True) == "The tool said: one"


@EVERY
async def test_a_request_fails_as_often_as_asked(stand_in: Models, api: str) -> None:
    asked = body(api, "fail: 503 2\nsay: at last")
    statuses = [(await post(stand_in, api, asked))[0] for _ in range(3)]
    assert statuses == [503, 503, 200]
    assert [one.outcome for one in await stand_in.asked("me")] == ["failed", "failed", "answered"]


@EVERY
async def test_a_connection_breaks(stand_in: Models, api: str) -> None:
    with pytest.raises(aiohttp.ClientError):
        await post(stand_in, api, body(api, "say: half\ncut:", stream=True))
    assert [one.outcome for one in await stand_in.asked("me")] == ["cut"]


@EVERY
async def test_who_hangs_up_is_seen(stand_in: Models, api: str) -> None:
    asking = asyncio.create_task(post(stand_in, api, body(api, "stream: 1000 50", stream=True)))
    outcomes: list[str] = []

    async def look(until: str) -> None:
        async with asyncio.timeout(20):
            while outcomes != [until]:
                outcomes[:] = [one.outcome for one in await stand_in.asked("me")]

    await look("answering")
    asking.cancel()
    await look("abandoned")
    await eventually(asking.done)


async def test_a_request_without_tools_gets_a_title_and_is_no_part_of_the_log(stand_in: Models) -> None:
    _, answer = await post(stand_in, CHAT, body(CHAT, "fail: 500", tools=False))
    assert said_in(CHAT, answer, stream=False) == "Small talk"
    assert await stand_in.asked("me") == []
    assert len(await stand_in.everything("me")) == 1


async def test_names_keep_apart_what_was_asked(stand_in: Models) -> None:
    for name in ("ada", "bob", "bob"):
        await post(stand_in, CHAT, body(CHAT, name), name)
    assert [len(await stand_in.asked(name)) for name in ("ada", "bob", "eve")] == [1, 2, 0]
    assert (await stand_in.body("ada", 0))["messages"][0]["content"] == "ada"


async def test_a_tool_that_is_not_there_is_told(stand_in: Models) -> None:
    status, answer = await post(stand_in, CHAT, body(CHAT, "call: no_such_tool {}"))
    assert status == 400
    assert "no_such_tool" in answer
