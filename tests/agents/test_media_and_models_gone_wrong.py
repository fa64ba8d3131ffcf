"""What reaches the models of real agents, and what becomes of a turn whose model is slow, fails or hangs up."""

from __future__ import annotations

import asyncio
import base64
import json

import pytest
from google.protobuf.duration_pb2 import Duration

from hearth.session.v1 import session_pb2 as sessions
from hearth.types.v1 import content_pb2
from tests.agents.conftest import Seen
from tests.agents.people import Meet
from tests.agents.roster import Agent
from tests.contract.pool.house import eventually
from tests.contract.pool.test_attachments import path_of, put
from tests.support.models.process import Models
from tests.support.models.server import Asked

pytestmark = [pytest.mark.exhaustive, pytest.mark.timeout(400)]

DOT = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)


@pytest.fixture
def log_name(daemon: str, agent: Agent) -> str:
    """Under which name the models log what this agent asks."""
    return f"{daemon}-{agent.name}"


async def asked_with(stand_in: Models, name: str, words: str) -> Asked:
    """The first request whose last message of a user has these words."""
    found = [one for one in await stand_in.asked(name) if one.users and words in one.users[-1]]
    assert found, words
    return found[0]


async def test_an_image_reaches_the_model(meet: Meet, agent: Agent, stand_in: Models, log_name: str) -> None:
    person = meet(model=agent.images)
    image = content_pb2.ContentPart(inline_media=content_pb2.InlineMediaPart(media_type="image/png", data=DOT))
    execution_id = await person.send("what is on picture-7281?", extra=[image])
    assert (await person.until_the_end(execution_id)).kind == "completed"
    asked = await asked_with(stand_in, log_name, "picture-7281")
    assert asked.images == 1
    if agent.images:
        assert asked.model == agent.images.rpartition("/")[2], "the model of the spec was chosen"


async def test_a_file_lies_where_the_agent_is_told(meet: Meet, stand_in: Models, log_name: str) -> None:
    person = meet()
    file = await put(person.backend, person.key, b"the file says 5093\n", name="notes.txt")
    part = content_pb2.ContentPart(attachment=file)
    execution_id = await person.send("read file-6614 please", extra=[part])
    assert (await person.until_the_end(execution_id)).kind == "completed"
    asked = await asked_with(stand_in, log_name, "file-6614")
    assert path_of(file) in json.dumps(await stand_in.body(log_name, asked.number))
    turn = await person.say(f"run: cat {path_of(file)}; touch seen")
    assert "the file says 5093" in turn.text


async def test_instructions_reach_the_model_after_a_restart_too(meet: Meet, stand_in: Models, log_name: str) -> None:
    person = meet(instructions="Speak like the pirate 8817.")
    for text in ("say: hello 3391", "say: hello 3392"):
        assert (await person.say(text)).text.endswith(text.removeprefix("say: "))
        asked = await asked_with(stand_in, log_name, text)
        assert "pirate 8817" in json.dumps(await stand_in.body(log_name, asked.number))
        if text.endswith("1"):
            await person.forget()


async def test_a_model_that_refuses_fails_the_turn_and_not_the_session(meet: Meet, agent: Agent, seen: Seen) -> None:
    person = meet()
    turn = await person.say("fail: 400")
    assert (turn.kind, turn.ending.execution_failed.code) == ("failed", agent.refused)
    seen(f"`{agent.refused}`")
    again = await person.say("say: better now")
    assert again.kind == "completed"
    assert "better now" in again.text


async def test_a_model_that_fails_for_a_moment_is_asked_again(meet: Meet) -> None:
    person = meet()
    turn = await person.say("fail: 500 1\nsay: at last")
    assert turn.kind == "completed"
    assert "at last" in turn.text


async def test_a_model_that_hangs_up_is_asked_again_or_fails_the_turn(meet: Meet, seen: Seen) -> None:
    person = meet(limits=sessions.TurnLimits(turn=Duration(seconds=20)))
    turn = await person.say("say: half a\nstall: 1\ncut:")
    assert turn.kind in ("completed", "failed")
    assert "half a" in turn.text
    seen("asked again" if turn.kind == "completed" else f"`{turn.ending.execution_failed.code}`")
    again = await person.say("say: whole")
    assert again.kind == "completed"
    assert "whole" in again.text


async def test_a_slow_model_is_waited_for_as_long_as_the_limit(meet: Meet) -> None:
    person = meet(limits=sessions.TurnLimits(first_response=Duration(seconds=30)))
    turn = await person.say("stall: 4\nsay: late")
    assert turn.kind == "completed"
    assert turn.text.endswith("late")


async def test_a_model_that_says_nothing_fails_the_turn_at_its_limit(
    meet: Meet, stand_in: Models, log_name: str
) -> None:
    person = meet(limits=sessions.TurnLimits(first_response=Duration(seconds=5)))
    turn = await person.say("stall: 307\nsay: never")
    assert (turn.kind, turn.ending.execution_failed.code) == ("failed", "FIRST_RESPONSE_LIMIT")
    again = await person.say("say: alive")
    assert again.kind == "completed"
    assert "alive" in again.text
    asked = await asked_with(stand_in, log_name, "stall: 307")
    assert asked.outcome == "abandoned", "nobody waits for the model any longer"


async def test_stop_while_the_model_says_nothing(meet: Meet, stand_in: Models, log_name: str) -> None:
    person = meet()
    before = len(await stand_in.asked(log_name))
    execution_id = await person.send("stall: 200\nsay: never")

    async def asked() -> bool:
        return len(await stand_in.asked(log_name)) > before

    await eventually(asked, timeout=60, every=0.1)
    turn = await person.stop(execution_id)
    assert turn.kind == "stopped"
    again = await person.say("say: alive")
    assert (again.kind, again.how) == ("completed", "warm")


async def test_two_sessions_at_a_time_keep_apart(meet: Meet) -> None:
    ada, bob = meet(), meet()
    turns = await asyncio.gather(ada.say("I am Ada."), bob.say("I am Bob."))
    assert [turn.kind for turn in turns] == ["completed", "completed"]
    hers, his = await asyncio.gather(ada.say("recall:"), bob.say("recall:"))
    assert "Ada" in hers.text
    assert "Bob" not in hers.text
    assert "Bob" in his.text
    assert "Ada" not in his.text
