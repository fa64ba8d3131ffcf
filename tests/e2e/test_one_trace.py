"""One turn is one trace: from the caller's own span through pool, sandbox, agent, history, bus and relay; and nothing
that anybody wrote is in it."""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from hearth.tracing.layout import Row, Trace
from hearth.tracing.store import NotFound
from tests.support.caller import SERVICE, Caller, calling
from tests.support.cli import Hearth
from tests.support.waiting import eventually

pytestmark = pytest.mark.asyncio(loop_scope="session")

SEND = "hearth.session.v1.SessionService/SendInput"
STOP = "hearth.session.v1.SessionService/StopExecution"
ACQUIRE = "hearth.sandbox.v1.SandboxService/Acquire"
RELEASE = "hearth.sandbox.v1.SandboxService/Release"
SUBSCRIBE = "hearth.relay.v1.RelayService/Subscribe"
# What is written last, and by whom else than the pool: the start and the ending are told on their own.
TOLD = ("history.commit", "publish hearth:live", "process hearth:live")
LAST = (RELEASE, RELEASE, "turn.park", *TOLD, *TOLD, "publish hearth:live", "process hearth:live")
SECRET = "geheim"


@pytest_asyncio.fixture(loop_scope="session")
async def caller(hearth: Hearth) -> AsyncIterator[Caller]:
    """A backend with spans of its own."""
    async with calling(hearth) as found:
        yield found


def named(trace: Trace, name: str) -> list[Row]:
    return [row for row in trace.rows if row.span.name == name]


def above(trace: Trace, row: Row) -> list[str]:
    """The names of the spans above one, the nearest first."""
    by_id = {found.span.span_id: found for found in trace.rows}
    names = []
    while row.span.parent_id:
        row = by_id[row.span.parent_id]
        names.append(row.span.name)
    return names


async def test_a_turn_is_one_trace_below_its_caller_s_span(hearth: Hearth, caller: Caller) -> None:
    session = f"trace-{uuid.uuid4().hex[:8]}"
    for text in (f'tool search {{"for": "{SECRET}"}}\nhello {SECRET}', f"hello again {SECRET}"):
        # Somebody has to read along, else the relay has no reason to take part.
        async with hearth.watching(session, "--tail") as reader:
            await reader.until(lambda items: any("ready" in item for item in items))
            trace = await caller.traced(await caller.send(session, text), *LAST)
        roots = [row for row in trace.rows if row.depth == 0]
        assert [(row.span.service, row.span.name, row.span.parent_id) for row in roots] == [(SERVICE, "POST /chat", "")]
        assert set(trace.services) == {SERVICE, "pool", "sandbox", "history", "relay"}
        assert [(row.span.name, row.span.error) for row in trace.rows if row.span.error] == []

        (turn,) = named(trace, "turn")
        assert above(trace, turn) == [SEND, "POST /chat"]
        stages = ["admit", "acquire", "open", "first_output", "model", "settle", "park"]
        assert {row.span.name for row in trace.rows} >= {f"turn.{stage}" for stage in stages}
        for row in trace.rows:
            if row.span.name.startswith("turn."):
                assert above(trace, row)[-3:] == ["turn", SEND, "POST /chat"]
        # Both ends of a call, and what is done for it.
        assert [above(trace, row)[:2] for row in named(trace, ACQUIRE)] == [
            ["turn.acquire", "turn"],
            [ACQUIRE, "turn.acquire"],
        ]
        assert above(trace, named(trace, "sandbox.probe")[0])[:3] == [ACQUIRE, ACQUIRE, "turn.acquire"]
        assert {row.span.service for row in named(trace, RELEASE)} == {"pool", "sandbox"}
        (prompt,) = named(trace, "session/prompt")
        assert above(trace, prompt)[:2] == ["invoke_agent scripted", "turn"]
        assert [above(trace, row)[0] for row in named(trace, "execute_tool other")] == (
            ["invoke_agent scripted"] if text.startswith("tool") else []
        )

        # The start is a fact of the call, the output one of the turn; both are told over the bus.
        commits = named(trace, "history.commit") + named(trace, "history.append")
        assert {above(trace, row)[0] for row in commits} == {SEND, "turn"}
        # The first frames go to the relay, through the bus and to the readers.
        assert [
            above(trace, row)[:2]
            for row in named(trace, "process hearth:live")
            if "hearth.frames" in row.span.attributes
        ] == [["publish hearth:live", "turn"]]
        assert {row.span.service for row in named(trace, "publish hearth:live")} == {"history", "relay"}
        for row in named(trace, "process hearth:live"):
            assert row.span.service == "relay"
            assert above(trace, row)[0] in ("history.commit", "history.append", "publish hearth:live")
            # The reader's stream has a trace of its own.
            assert SUBSCRIBE in {trace.linked[link].name for _, link in row.span.links if link in trace.linked}
    assert SECRET not in "".join(path.read_text() for path in (hearth.root / "traces").iterdir())


async def test_names_and_attributes_follow_the_conventions(caller: Caller) -> None:
    trace = await caller.traced(await caller.send(f"trace-{uuid.uuid4().hex[:8]}", "hello"), "turn.park")
    of = {row.span.name: row.span for row in trace.rows}
    kinds = {row.span.kind for row in trace.rows if row.span.name == ACQUIRE}
    assert kinds == {"CLIENT", "SERVER"}
    assert of[SEND].attributes["rpc.system.name"] == "grpc"
    assert of[SEND].attributes["rpc.method"] == SEND
    assert of[SEND].attributes["rpc.response.status_code"] == "OK"
    assert of["session/prompt"].attributes["rpc.system.name"] == "jsonrpc"
    assert of["admit"].attributes["db.system.name"] == "postgresql"
    assert of["admit"].attributes["db.query.summary"] == "admit"
    assert of["POST"].attributes["http.request.method"] == "POST"
    assert of["POST"].attributes["http.response.status_code"] == 200
    agent = of["invoke_agent scripted"]
    assert agent.kind == "CLIENT"
    assert agent.attributes["gen_ai.operation.name"] == "invoke_agent"
    assert agent.attributes["gen_ai.agent.name"] == "scripted"
    assert agent.attributes["gen_ai.response.finish_reasons"] == ["end_turn"]
    published = of["publish hearth:live"]
    assert published.kind == "PRODUCER"
    assert published.attributes["messaging.operation.type"] == "send"
    turn = of["turn"].attributes
    assert (turn["hearth.project"], turn["hearth.execution"]) == ("demo", of["turn"].execution)


async def test_a_turn_that_fails_is_marked_and_what_was_said_is_not_told(hearth: Hearth, caller: Caller) -> None:
    session = f"trace-{uuid.uuid4().hex[:8]}"
    trace = await caller.traced(await caller.send(session, f"error the model is {SECRET}"), "turn.settle")
    failed = {row.span.name: row.span.error for row in trace.rows if row.span.error}
    assert failed.keys() >= {"turn", "invoke_agent scripted", "session/prompt"}
    # Numbers and codes, and not the words of the agent.
    assert failed["session/prompt"].lstrip("-").isdecimal()
    assert failed["turn"] == failed["invoke_agent scripted"]
    assert failed["turn"].isupper()
    assert SECRET not in "".join(path.read_text() for path in (hearth.root / "traces").iterdir())


async def test_a_message_of_the_program_has_its_span_as_root(hearth: Hearth, caller: Caller) -> None:
    sent = (await hearth.run("send", f"trace-{uuid.uuid4().hex[:8]}", "hello", "--json")).json()
    trace = await caller.traced(sent["started"]["execution"]["execution_id"], "turn.park")
    assert [(row.span.service, row.span.name) for row in trace.rows if row.depth == 0] == [("cli", "hearth send")]
    assert [above(trace, row) for row in named(trace, "turn")] == [[SEND, "hearth send"]]


async def test_a_turn_that_runs_is_found_by_its_execution(hearth: Hearth, caller: Caller) -> None:
    session = f"trace-{uuid.uuid4().hex[:8]}"
    execution = await caller.send(session, "stream 2000 words at 200/s")

    def found() -> bool:
        try:
            names = {span.name for span in caller.store.find(execution)}
        except NotFound:
            return False
        return {SEND, "turn.acquire", "session/new"} <= names and "turn" not in names

    await eventually(found)
    assert (await hearth.run("stop", session)).code == 0
    trace = await caller.traced(execution)
    assert len(trace.executions) == 1
    # The Stop has a trace of its own, from which that of the turn is found.
    turn = named(trace, "turn")[0].span.trace_id

    def linked() -> bool:
        stops = [span for span in caller.store.all() if (span.name, span.service) == (STOP, "pool")]
        return any(span.trace_id != turn and turn in {of for of, _ in span.links} for span in stops)

    await eventually(linked)
