"""C1, C2, C5: a turn that nobody answers is paused without losing a question, and the answers start one continuation
that is told what was decided, whatever became of the pool meanwhile."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import event_pb2, session_pb2
from services.chassis import crashpoints
from services.pool.sealing import new_key
from tests.contract.pool.house import Backend, House, agent_text, eventually, frozen, is_ending, key, summary
from tests.contract.pool.people import (
    AGENT,
    ALLOWED,
    DENIED,
    Journal,
    answer,
    asked,
    asking,
    continuation,
    interactions,
    resolved,
    state_of,
    tools_of,
)
from tests.contract.pool.refusals import refused
from tests.support.exhaustive import sampled
from tests.support.replicas import FAST
from tests.support.servers import Servers
from tests.support.waiting import eventually as until

pytestmark = pytest.mark.timeout(180)

WAITING_CAP = 2


@pytest.fixture(scope="module")
def directory(servers: Servers) -> Path:
    """Where agents write down what reaches them, and a test says where the pool is to die."""
    return servers.scratch()


@pytest.fixture(scope="module")
def house(servers: Servers, module_postgres_dsn: str, module_valkey_url: str, directory: Path) -> Iterator[House]:
    """Services whose agents ask people, and wait for them for half a second, or for ever."""
    env = {
        **FAST,
        **asking(directory / "agents.jsonl"),
        "HEARTH_APPROVAL_WINDOW": "0.5",
        "HEARTH_LOCAL_WARM_CAP": str(WAITING_CAP),
        "HEARTH_SHUTDOWN_GRACE": "12",
        "HEARTH_SECRET_KEY": new_key(),
        crashpoints.VARIABLE: f"@{directory / 'plan'}",
    }
    with House(servers.scratch(), module_postgres_dsn, module_valkey_url, env).running() as found:
        yield found


@pytest_asyncio.fixture
async def backend(house: House, directory: Path) -> AsyncIterator[Backend]:
    """A backend of those; a pool that a test has ended runs again after it, as it ran before."""
    found = Backend(house)
    yield found
    await found.close()
    (directory / "plan").unlink(missing_ok=True)
    house.pool.env["HEARTH_APPROVAL_WINDOW"] = "0.5"


@pytest.fixture
def journal(directory: Path) -> Journal:
    """What the agents wrote down."""
    return Journal(directory / "agents.jsonl")


@pytest_asyncio.fixture
async def patient(house: House) -> AsyncIterator[House]:
    """A pool that waits for people for long."""
    house.pool.env["HEARTH_APPROVAL_WINDOW"] = "600"
    await restarted(house)
    yield house
    house.pool.env["HEARTH_APPROVAL_WINDOW"] = "0.5"
    if house.pool.running:
        await house.pool.terminate()
    await house.pool.start()


async def restarted(house: House) -> None:
    """End the pool in order, and start it again."""
    await house.pool.terminate()
    await house.pool.start()


async def sent(
    backend: Backend, session: session_pb2.SessionKey, text: str, *, spec: sessions.SessionSpec | None = None
) -> str:
    """Send a message that starts at once; its execution."""
    response = await backend.send(session, text, spec=spec)
    assert response.HasField("started"), response
    return response.started.execution.execution_id


async def has_begun(backend: Backend, session: session_pb2.SessionKey, execution_id: str) -> bool:
    """Whether the agent was asked."""
    return (await backend.execution(session, execution_id)).state == sessions.EXECUTION_STATE_RUNNING


async def paused(
    backend: Backend, session: session_pb2.SessionKey, execution_id: str, cards: list[sessions.Interaction]
) -> event_pb2.Event:
    """Wait until an execution is paused, with these interactions open."""
    ending = await backend.ending(session, execution_id)
    assert ending.HasField("execution_paused"), ending
    assert set(ending.execution_paused.interaction_ids) == {card.interaction_id for card in cards}
    assert (await backend.settled(session, execution_id)).outcome == sessions.EXECUTION_OUTCOME_PAUSED
    return ending


async def gone_on(backend: Backend, session: session_pb2.SessionKey, source: str) -> event_pb2.Event:
    """Wait for the ending of the execution that goes on with another."""
    started = await continuation(backend, session, source)
    return await backend.ending(session, started.execution_id)


async def test_w_p03_w_a15_a_turn_that_nobody_answers_is_paused_and_goes_on_with_the_answer(
    backend: Backend, journal: Journal
) -> None:
    session = key()
    await backend.run(session, "remember my name is Ada")
    execution_id = await sent(backend, session, 'fs-write note.txt kept\nask deploy {"to": "prod"}')
    (card,) = await asked(backend, session)
    await paused(backend, session, execution_id, [card])
    # The call that waits is neither done nor lost, and nobody has closed the question.
    assert card.request.tool_call_id not in await tools_of(backend, session, execution_id)
    assert (await backend.session(session)).open_interactions == 1
    assert await resolved(backend, session) == {}

    async def let_go() -> bool:
        return not await state_of(backend, session) and not await backend.running_sandboxes(session)

    await eventually(let_go)
    assert journal.of(execution_id, "permission") == []

    response = await answer(backend, session, {card.interaction_id: ALLOWED})
    assert response.execution.source_execution_id == execution_id
    ending = await gone_on(backend, session, execution_id)
    assert ending.execution_id == response.execution.execution_id
    assert ending.HasField("execution_completed")
    assert journal.told(ending.execution_id).strip() == ('The user approved deploy with {"to":"prod"}; run it once.')
    # It asked again for what was approved, and that was known.
    assert [line["outcome"] for line in journal.of(ending.execution_id, "permission")] == ["allow_once"]
    assert journal.ran(ending.execution_id) == ["deploy"]
    assert journal.ran(execution_id) == []
    assert len(await interactions(backend, session)) == 1
    assert (await resolved(backend, session))[card.interaction_id].resolution == (
        event_pb2.INTERACTION_RESOLUTION_CONSUMED
    )
    # The agent loaded its own record, so it still knows what was said; and its sandbox kept its disk.
    after = await backend.run(session, "what is my name?\nread note.txt")
    assert summary(after).how == "warm"
    said = agent_text(await backend.events(session), after.execution_id)
    assert "Ada" in said
    assert "note.txt: kept" in said


async def test_all_answers_go_into_one_continuation(backend: Backend, journal: Journal) -> None:
    session = key()
    text = 'parallel ask deploy {"n": 1}\nparallel ask remove {}\nparallel hearth-ask {"prompt": "Which?"}'
    execution_id = await sent(backend, session, text)
    cards = await asked(backend, session, 3)
    await paused(backend, session, execution_id, cards)
    by_name = {card.request.tool_name or card.request.prompt: card.interaction_id for card in cards}
    first = await answer(backend, session, {by_name["deploy"]: ALLOWED})
    assert (first.still_open, first.HasField("execution")) == (2, False)
    second = await answer(backend, session, {by_name["remove"]: DENIED, by_name["Which?"]: '"blue"'})
    assert second.execution.source_execution_id == execution_id
    ending = await gone_on(backend, session, execution_id)
    assert ending.HasField("execution_completed")
    assert sorted(journal.told(ending.execution_id).strip().splitlines()) == [
        'The user answered "Which?": "blue"',
        'The user approved deploy with {"n":1}; run it once.',
        "The user denied remove; do not retry it.",
    ]
    assert journal.ran(ending.execution_id) == ["deploy"]


async def test_w_a07_a_decision_is_used_once_and_for_the_same_call_only(backend: Backend, journal: Journal) -> None:
    session = key()
    text = 'parallel ask deploy {"asks": 2}\nparallel ask remove {"instead": {"path": "/"}}'
    execution_id = await sent(backend, session, text)
    cards = await asked(backend, session, 2)
    await paused(backend, session, execution_id, cards)
    await answer(backend, session, {card.interaction_id: ALLOWED for card in cards})
    started = await continuation(backend, session, execution_id)
    # One of the two same calls runs; the other one, and the one with other arguments, are asked anew.
    again = await asked(backend, session, 2, execution_id=started.execution_id)
    assert sorted((one.request.tool_name, one.request.input_json) for one in again) == [
        ("deploy", '{"asks":2}'),
        ("remove", '{"path":"/"}'),
    ]
    assert journal.ran(started.execution_id) == ["deploy"]
    await paused(backend, session, started.execution_id, again)
    await answer(backend, session, {one.interaction_id: DENIED for one in again})
    ending = await gone_on(backend, session, started.execution_id)
    assert journal.ran(ending.execution_id) == []
    # Of what ran the log has the result; what was approved and not seen to run is not approved again.
    assert sorted(journal.told(ending.execution_id).strip().splitlines()) == [
        "The user denied deploy; do not retry it.",
        "The user denied remove; do not retry it.",
        'remove with {"instead":{"path":"/"}}: approved, result unknown; check before repeating.',
    ]


async def test_a_call_that_was_allowed_before_the_pause_may_give_its_result(backend: Backend, journal: Journal) -> None:
    session = key()
    execution_id = await sent(backend, session, "parallel ask deploy {}\nparallel run sleep 2; echo done")
    (card,) = await asked(backend, session)
    await paused(backend, session, execution_id, [card])
    assert list((await tools_of(backend, session, execution_id)).values()) == ["SUCCEEDED"]
    await answer(backend, session, {card.interaction_id: DENIED})
    ending = await gone_on(backend, session, execution_id)
    assert journal.told(ending.execution_id).strip() == "The user denied deploy; do not retry it."


async def test_beyond_the_cap_the_turn_that_asks_now_is_paused(patient: House, journal: Journal) -> None:
    backend = Backend(patient)
    try:
        waiting: list[tuple[session_pb2.SessionKey, str, sessions.Interaction]] = []
        for _ in range(WAITING_CAP + 1):
            session = key()
            execution_id = await sent(backend, session, "ask deploy {}")
            (card,) = await asked(backend, session)
            waiting.append((session, execution_id, card))
            if len(waiting) <= WAITING_CAP:
                assert await state_of(backend, session) == "AWAITING"
        session, execution_id, card = waiting.pop()
        await paused(backend, session, execution_id, [card])
        for session, execution_id, card in waiting:
            assert await state_of(backend, session) == "AWAITING"
            await answer(backend, session, {card.interaction_id: ALLOWED})
            ending = await backend.ending(session, execution_id)
            assert ending.HasField("execution_completed")
            assert journal.ran(execution_id) == ["deploy"]
    finally:
        await backend.close()


async def test_a_question_that_expires_is_denied_to_the_agent_that_waits(house: House, journal: Journal) -> None:
    house.pool.env.update(HEARTH_APPROVAL_WINDOW="600", HEARTH_INTERACTION_EXPIRY="2")
    await restarted(house)
    backend = Backend(house)
    try:
        session = key()
        text = 'parallel ask deploy {}\nparallel hearth-ask {"prompt": "Which?"}\nstream 2 words'
        execution_id = await sent(backend, session, text)
        cards = await asked(backend, session, 2)
        ending = await backend.ending(session, execution_id)
        assert ending.HasField("execution_completed")
        assert [line["outcome"] for line in journal.of(execution_id, "permission")] == ["reject_once"]
        assert [line["answer"] for line in journal.of(execution_id, "answer")] == [{"outcome": "cancelled"}]
        assert journal.ran(execution_id) == []
        assert await tools_of(backend, session, execution_id) == {cards[0].request.tool_call_id: "DENIED"}
        told = await resolved(backend, session)
        assert {told[card.interaction_id].resolution for card in cards} == {event_pb2.INTERACTION_RESOLUTION_EXPIRED}
    finally:
        await backend.close()
        house.pool.env["HEARTH_APPROVAL_WINDOW"] = "0.5"
        del house.pool.env["HEARTH_INTERACTION_EXPIRY"]
        await restarted(house)


@pytest.mark.parametrize("how", ["terminate", "kill"])
async def test_a_question_outlives_the_pool(patient: House, journal: Journal, how: str) -> None:
    backend = Backend(patient)
    try:
        session = key()
        await backend.run(session, "remember my name is Ada")
        execution_id = await sent(backend, session, "ask deploy {}")
        (card,) = await asked(backend, session)
        if how == "kill":
            patient.pool.kill9()
        else:
            await patient.pool.terminate()
        await patient.pool.start()
        await paused(backend, session, execution_id, [card])
        assert [one.interaction_id for one in await asked(backend, session)] == [card.interaction_id]
        await answer(backend, session, {card.interaction_id: ALLOWED})
        ending = await gone_on(backend, session, execution_id)
        assert ending.HasField("execution_completed")
        assert journal.ran(execution_id) == []
        assert journal.ran(ending.execution_id) == ["deploy"]
        endings = [e.type for e in await backend.events(session) if is_ending(e, execution_id)]
        assert endings == ["execution.paused"]
        after = await backend.run(session, "what is my name?")
        assert "Ada" in agent_text(await backend.events(session), after.execution_id)
    finally:
        await backend.close()


async def dies_at(house: House, directory: Path, point: str) -> None:
    """From now on the pool dies when it comes to a point."""
    (directory / "plan").write_text(f"pool.{point}\n")


async def dead(house: House, directory: Path, point: str) -> None:
    """Wait until the pool has died at a point, and start it again."""
    await until(lambda: not house.pool.running, timeout=30)
    assert f"crash point reached: pool.{point} (SIGKILL)" in house.pool.log()
    (directory / "plan").unlink()
    await house.pool.start()


async def test_w_a18_what_was_passed_on_and_is_not_known_to_have_run_is_not_approved_again(
    patient: House, directory: Path, journal: Journal
) -> None:
    """The pool dies between the commit that an answer is handed over and its being handed over."""
    backend = Backend(patient)
    try:
        session = key()
        execution_id = await sent(backend, session, 'parallel ask deploy {"n": 1}\nparallel ask remove {}')
        first, second = await asked(backend, session, 2)
        await dies_at(patient, directory, "answer.telling")
        await answer(backend, session, {first.interaction_id: ALLOWED})
        await dead(patient, directory, "answer.telling")
        await paused(backend, session, execution_id, [second])
        await answer(backend, session, {second.interaction_id: DENIED})
        ending = await gone_on(backend, session, execution_id)
        assert journal.told(ending.execution_id).strip().splitlines() == [
            'deploy with {"n":1}: approved, result unknown; check before repeating.',
            "The user denied remove; do not retry it.",
        ]
        assert journal.ran(execution_id) == journal.ran(ending.execution_id) == []
    finally:
        await backend.close()


@pytest.mark.parametrize("point", sampled(["pause.ending_taken", "pause.draining", "pause.settled"], every=3))
async def test_a_pool_that_dies_while_it_pauses_a_turn_leaves_the_question_open(
    house: House, backend: Backend, directory: Path, journal: Journal, point: str
) -> None:
    session = key()
    await dies_at(house, directory, point)
    execution_id = await sent(backend, session, "ask deploy {}")
    await dead(house, directory, point)
    (card,) = await asked(backend, session)
    await paused(backend, session, execution_id, [card])
    await answer(backend, session, {card.interaction_id: ALLOWED})
    ending = await gone_on(backend, session, execution_id)
    assert ending.HasField("execution_completed")
    assert (journal.ran(execution_id), journal.ran(ending.execution_id)) == ([], ["deploy"])
    assert [e.type for e in await backend.events(session) if is_ending(e, execution_id)] == ["execution.paused"]


async def test_what_comes_while_a_turn_is_being_paused(house: House, backend: Backend, journal: Journal) -> None:
    """From the moment on at which that is decided an answer is for the next execution, and a Stop finds nothing that
    runs; either is committed, and counts."""
    answered, stopped = key("answered"), key("stopped")
    execution_id, other_id = [
        await sent(backend, session, "stream 2 words\nsleep 2\nask deploy {}") for session in (answered, stopped)
    ]
    await eventually(lambda: has_begun(backend, answered, execution_id))
    await eventually(lambda: has_begun(backend, stopped, other_id))
    with frozen(house, "history"):
        (card,) = await asked(backend, answered)
        (other,) = await asked(backend, stopped)

        async def draining() -> bool:
            return [await state_of(backend, session) for session in (answered, stopped)] == ["DRAINING"] * 2

        await eventually(draining)
        assert (await backend.execution(answered, execution_id)).state == sessions.EXECUTION_STATE_WAITING
        response = await answer(backend, answered, {card.interaction_id: ALLOWED})
        assert response.interactions[0].state == sessions.INTERACTION_STATE_ANSWERED
        command = await backend.stop(stopped, other_id)
        await asyncio.sleep(1.5)
        assert (await interactions(backend, answered))[0].state == sessions.INTERACTION_STATE_ANSWERED
        # The agents are closed only after the settlement.
        assert await draining()
    assert (await backend.ending(answered, execution_id)).HasField("execution_paused")
    after = await gone_on(backend, answered, execution_id)
    assert (journal.ran(execution_id), journal.ran(after.execution_id)) == ([], ["deploy"])
    assert len([e for e in await backend.events(answered) if e.HasField("execution_started")]) == 2

    assert (await backend.ending(stopped, other_id)).HasField("execution_paused")
    await backend.settled(stopped, other_id)
    assert (await backend.command(stopped, command.command_id)).outcome == sessions.COMMAND_OUTCOME_NOT_RUNNING
    assert (await interactions(backend, stopped))[0].state == sessions.INTERACTION_STATE_CLOSED
    assert (await refused(answer(backend, stopped, {other.interaction_id: ALLOWED}))).reason == "INTERACTION_CLOSED"
    assert journal.ran(other_id) == []


async def test_answers_of_a_continuation_that_never_reached_its_agent_go_with_the_next_message(
    backend: Backend, journal: Journal
) -> None:
    session = key()
    name = f"token-{session.session}"

    async def put() -> None:
        request = calls.PutCredentialRequest(project="acme", request_id=str(uuid.uuid4()), name=name, value="secret")
        await backend.sessions.PutCredential(request, timeout=20)

    await put()
    spec = sessions.SessionSpec(agent=AGENT)
    spec.credentials.add(credential=name, target="TOKEN")
    execution_id = await sent(backend, session, 'ask deploy {"n": 1}', spec=spec)
    (card,) = await asked(backend, session)
    await paused(backend, session, execution_id, [card])
    gone = calls.DeleteCredentialRequest(project="acme", request_id=str(uuid.uuid4()), name=name)
    await backend.sessions.DeleteCredential(gone, timeout=20)
    await answer(backend, session, {card.interaction_id: ALLOWED})
    ending = await gone_on(backend, session, execution_id)
    assert ending.HasField("execution_failed"), ending
    assert journal.of(ending.execution_id, "prompt") == []
    assert (await interactions(backend, session))[0].state == sessions.INTERACTION_STATE_ANSWERED
    await put()
    after = await backend.run(session, "stream 2 words")
    assert after.HasField("execution_completed")
    assert [line for line in journal.told(after.execution_id).splitlines() if line][-2:] == [
        'The user approved deploy with {"n":1}; run it once.',
        "stream 2 words",
    ]
    assert journal.ran(after.execution_id) == ["deploy"]
    assert (await interactions(backend, session))[0].state == sessions.INTERACTION_STATE_CONSUMED


async def test_a_stop_of_a_paused_execution_closes_its_questions(backend: Backend) -> None:
    session = key()
    execution_id = await sent(backend, session, "ask deploy {}")
    (card,) = await asked(backend, session)
    await paused(backend, session, execution_id, [card])
    command = await backend.stop(session, execution_id)
    assert command.outcome == sessions.COMMAND_OUTCOME_NOT_RUNNING
    assert (await interactions(backend, session))[0].state == sessions.INTERACTION_STATE_CLOSED
    assert (await refused(answer(backend, session, {card.interaction_id: ALLOWED}))).reason == "INTERACTION_CLOSED"
    after = await backend.run(session, "hello")
    assert after.HasField("execution_completed")
