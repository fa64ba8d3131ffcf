"""A stranger with grpcurl: lists, describes, sends a turn, subscribes, and is told what is wrong."""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests.support.cli import Hearth

pytestmark = pytest.mark.asyncio(loop_scope="session")
GRPCURL = Path(sys.executable).parent / "grpcurl"


async def grpcurl(*arguments: str, seconds: float = 30.0) -> tuple[int, str, str]:
    process = await asyncio.create_subprocess_exec(
        GRPCURL, "-plaintext", *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        async with asyncio.timeout(seconds):
            stdout, stderr = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    return process.returncode or 0, stdout.decode(), stderr.decode()


def objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects that grpcurl prints one after the other."""
    decoder, found, at = json.JSONDecoder(), [], 0
    while (at := text.find("{", at)) != -1:
        content, at = decoder.raw_decode(text, at)
        found.append(content)
    return found


@pytest.mark.parametrize(
    ("service", "name"),
    [
        ("pool", "hearth.session.v1.SessionService"),
        ("pool", "hearth.pool.v1.PoolService"),
        ("history", "hearth.history.v1.HistoryService"),
        ("relay", "hearth.relay.v1.RelayService"),
        ("sandbox", "hearth.sandbox.v1.SandboxService"),
    ],
)
async def test_lists_and_describes(hearth: Hearth, service: str, name: str) -> None:
    address = hearth.addresses()[service]
    code, listed, _ = await grpcurl(address, "list")
    assert code == 0
    assert name in listed.split()
    assert "grpc.health.v1.Health" in listed.split()
    code, described, _ = await grpcurl(address, "describe", name)
    assert code == 0
    assert "rpc " in described
    code, health, _ = await grpcurl(address, "grpc.health.v1.Health/Check")
    assert code == 0
    assert "SERVING" in health


async def test_sends_a_turn_and_subscribes(hearth: Hearth) -> None:
    key = {"project": "demo", "session": f"grpcurl-{uuid.uuid4().hex[:8]}"}
    where = hearth.addresses()
    message = {"session": key, "request_id": "r1", "content": [{"text": {"text": "hello"}}]}
    call = ("-d", json.dumps(message), where["pool"], "hearth.session.v1.SessionService/SendInput")
    code, sent, problem = await grpcurl(*call)
    assert code == 0, problem
    execution = json.loads(sent)["started"]["execution"]["execution_id"]
    code, again, _ = await grpcurl(*call)
    assert code == 0
    assert json.loads(again)["started"]["execution"]["execution_id"] == execution

    subscription = await asyncio.create_subprocess_exec(
        GRPCURL,
        "-plaintext",
        *("-d", json.dumps({"session": key}), where["relay"], "hearth.relay.v1.RelayService/Subscribe"),
        stdout=asyncio.subprocess.PIPE,
    )
    received = ""
    try:
        assert subscription.stdout is not None
        async with asyncio.timeout(30):
            while '"execution.completed"' not in received:
                chunk = await subscription.stdout.read(65536)
                assert chunk, received
                received += chunk.decode()
    finally:
        subscription.terminate()
        await subscription.wait()
    assert "message.completed" in received
    code, read, _ = await grpcurl(
        "-d", json.dumps({"session": key}), where["history"], "hearth.history.v1.HistoryService/ReadEvents"
    )
    assert code == 0
    events = json.loads(read)["events"]
    assert [int(item["cursor"]["sequence"]) for item in events] == list(range(1, len(events) + 1))
    assert events[-1]["event"]["type"] == "execution.completed"


async def test_answers_what_an_agent_asks(hearth: Hearth) -> None:
    key = {"project": "demo", "session": f"grpcurl-{uuid.uuid4().hex[:8]}"}
    pool = hearth.addresses()["pool"]

    async def call(method: str, **request: object) -> dict[str, Any]:
        sent = json.dumps({"session": key, **request})
        code, answer, problem = await grpcurl("-d", sent, pool, f"hearth.session.v1.SessionService/{method}")
        assert code == 0, problem
        found: dict[str, Any] = json.loads(answer)
        return found

    spec = {"permissions": {"default_action": "PERMISSION_ACTION_ASK"}}
    content = [{"text": {"text": 'ask search {"for": "hearths"}'}}]
    await call("SendInput", request_id="r1", spec=spec, content=content)
    async with asyncio.timeout(60):
        while not (asked := (await call("ListInteractions", pending_only=True)).get("interactions")):
            pass
    (card,) = asked
    answer = {"interaction_id": card["interaction_id"], "decision": "DECISION_ALLOWED"}
    answered = await call("AnswerInteractions", request_id="a1", answered_by="ann", answers=[answer])
    assert answered["interactions"][0]["answered_by"] == "ann"
    steered = await call("SendInput", request_id="r2", on_busy="ON_BUSY_STEER", content=[{"text": {"text": "hello"}}])
    assert {"steered", "started"} & set(steered)
    await call("ListInputs")


async def test_bad_input_names_the_field_and_the_reason(hearth: Hearth) -> None:
    pool = hearth.addresses()["pool"]
    message = {"session": {"project": "demo", "session": ""}, "request_id": "r1", "content": [{"text": {"text": "x"}}]}
    code, _, problem = await grpcurl("-d", json.dumps(message), pool, "hearth.session.v1.SessionService/SendInput")
    assert code != 0
    assert "InvalidArgument" in problem
    assert "session.session" in problem
    assert "INVALID_FIELD" in problem
