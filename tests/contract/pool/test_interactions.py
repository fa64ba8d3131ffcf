"""C1, C2, C5 as the backend sees them: what AnswerInteractions and ListInteractions take, refuse and tell, beside an
agent that waits and is not disturbed by any of it."""

from __future__ import annotations

import asyncio
import uuid

import asyncpg
import grpc
import grpc.aio
import pytest

from hearth.pool.v1 import pool_pb2, pool_service_pb2
from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import event_pb2, session_pb2
from services.pool.control.gates import input_digest
from tests.contract.pool.house import Backend, House, agent_log_of, key
from tests.contract.pool.people import ALLOWED, DENIED, Journal, answer, asked, interactions, resolved
from tests.contract.pool.refusals import refused


@pytest.fixture(scope="module")
def house(asking_house: House) -> House:
    """Services whose agents ask people, and wait for them for long."""
    return asking_house


@pytest.fixture
def journal(house: House) -> Journal:
    """What the agents wrote down."""
    return Journal(agent_log_of(house.directory))


async def waiting(
    backend: Backend, text: str = "ask edit {}", number: int = 1
) -> tuple[session_pb2.SessionKey, str, list[sessions.Interaction]]:
    """A session whose agent waits for people; the execution, and what is asked."""
    session = key()
    sent = await backend.send(session, text)
    assert sent.HasField("started"), sent
    return session, sent.started.execution.execution_id, await asked(backend, session, number)


def request_of(
    session: session_pb2.SessionKey, *answers: sessions.InteractionAnswer
) -> calls.AnswerInteractionsRequest:
    """A request with answers."""
    return calls.AnswerInteractionsRequest(session=session, request_id=str(uuid.uuid4()), answers=answers)


def one(interaction_id: str = "", **fields: object) -> sessions.InteractionAnswer:
    """An answer."""
    return sessions.InteractionAnswer(interaction_id=interaction_id or str(uuid.uuid4()), **fields)  # type: ignore[arg-type]


async def entries_of(backend: Backend, *keys: session_pb2.SessionKey) -> list[pool_pb2.Entry]:
    """The live agents of sessions."""
    found = (await backend.pools.ListEntries(pool_service_pb2.ListEntriesRequest())).entries
    return [entry for entry in found if entry.session in keys]


_ID = str(uuid.uuid4())
_WRONG: list[tuple[str, list[sessions.InteractionAnswer]]] = [
    ("answers", []),
    ("answers", [one(decision=ALLOWED) for _ in range(101)]),
    ("answers[0].interaction_id", [sessions.InteractionAnswer(decision=ALLOWED)]),
    ("answers[0].interaction_id", [one("no-uuid", decision=ALLOWED)]),
    ("answers[1].interaction_id", [one(_ID, decision=ALLOWED), one(_ID.upper(), decision=ALLOWED)]),
    ("answers[0].decision", [one(decision=7)]),
    ("answers[0].answer_json", [one(answer_json="no json")]),
    ("answers[0].answer_json", [one(answer_json="NaN")]),
    ("answers[1].answer_json", [one(answer_json="1"), one(answer_json='"' + "x" * (256 * 1024) + '"')]),
]


@pytest.mark.parametrize(("field", "answers"), _WRONG, ids=[f"{n}-{field}" for n, (field, _) in enumerate(_WRONG)])
async def test_a_wrong_field_is_named(backend: Backend, field: str, answers: list[sessions.InteractionAnswer]) -> None:
    error = await refused(backend.sessions.AnswerInteractions(request_of(key(), *answers)))
    assert error.code is grpc.StatusCode.INVALID_ARGUMENT
    assert field in [name for name, _ in error.field_violations]


async def test_other_wrong_requests(backend: Backend) -> None:
    good = request_of(key(), one(decision=ALLOWED))
    assert (await refused(backend.sessions.AnswerInteractions(good))).reason == "SESSION_NOT_FOUND"
    for field, value in (("request_id", ""), ("answered_by", "x" * 256), ("answered_by", "a\0b")):
        wrong = calls.AnswerInteractionsRequest()
        wrong.CopyFrom(good)
        setattr(wrong, field, value)
        error = await refused(backend.sessions.AnswerInteractions(wrong))
        assert field in [name for name, _ in error.field_violations]
    listing = calls.ListInteractionsRequest(session=key())
    assert (await refused(backend.sessions.ListInteractions(listing))).reason == "SESSION_NOT_FOUND"


async def test_both_ids_digest_and_time_are_given_everywhere(backend: Backend) -> None:
    session, execution_id, (gate,) = await waiting(backend, 'ask edit {"path": "a", "lines": [1, 2]}')
    event = await backend.event(session, "interaction_requested")
    assert event.interaction_requested == gate.request
    assert (event.execution_id, event.entity_id) == (gate.execution_id, gate.interaction_id)
    assert (gate.execution_id, gate.request.interaction_id) == (execution_id, gate.interaction_id)
    assert gate.request.tool_call_id not in {"", gate.interaction_id}
    assert gate.request.input_digest == input_digest('{"lines":[1,2],"path":"a"}').hex()
    lasts = gate.request.expires_at.ToSeconds() - gate.created_at.ToSeconds()
    assert lasts == pytest.approx(7 * 86400, abs=2)
    assert (await backend.session(session)).open_interactions == 1
    response = await answer(backend, session, {gate.interaction_id: ALLOWED})
    assert response.interactions[0].request == gate.request
    assert (response.execution.execution_id, response.still_open) == (execution_id, 0)
    await backend.ending(session, execution_id)
    told = [e for e in await backend.events(session) if e.entity_id == gate.interaction_id]
    assert [e.type for e in told] == ["interaction.requested", "interaction.answered", "interaction.resolved"]
    assert told[1].interaction_answered.tool_call_id == gate.request.tool_call_id
    assert told[2].interaction_resolved.tool_call_id == gate.request.tool_call_id
    assert (await backend.session(session)).open_interactions == 0


async def test_wrong_and_foreign_answers_are_refused_and_change_nothing(backend: Backend, journal: Journal) -> None:
    session, execution_id, (gate,) = await waiting(backend)
    other, _, (foreign,) = await waiting(backend)
    entries = await entries_of(backend, session, other)
    assert [entry.state for entry in entries] == [pool_pb2.ENTRY_STATE_AWAITING] * 2
    wrong = [
        (request_of(session, one(decision=ALLOWED)), "INTERACTION_NOT_FOUND"),
        (request_of(session, one(foreign.interaction_id, decision=ALLOWED)), "INTERACTION_NOT_FOUND"),
        (
            request_of(
                session_pb2.SessionKey(project="other", session=session.session),
                one(gate.interaction_id, decision=ALLOWED),
            ),
            "SESSION_NOT_FOUND",
        ),
        # One that is good does not make up for one that is not.
        (
            request_of(session, one(gate.interaction_id, decision=ALLOWED), one(decision=ALLOWED)),
            "INTERACTION_NOT_FOUND",
        ),
        (request_of(session, one(gate.interaction_id)), "INVALID_FIELD"),
        (request_of(session, one(gate.interaction_id, answer_json='"yes"')), "INVALID_FIELD"),
        (request_of(session, one(gate.interaction_id, decision=ALLOWED, answer_json="1")), "INVALID_FIELD"),
    ]
    for request, reason in wrong:
        error = await refused(backend.sessions.AnswerInteractions(request))
        assert error.reason == reason
    assert [one.state for one in await interactions(backend, session)] == [sessions.INTERACTION_STATE_PENDING]
    # The agents wait on, in what they waited in.
    assert await entries_of(backend, session, other) == entries
    await answer(backend, other, {foreign.interaction_id: DENIED})
    await answer(backend, session, {gate.interaction_id: ALLOWED})
    assert (await backend.ending(session, execution_id)).HasField("execution_completed")
    assert journal.ran(execution_id) == ["edit"]


async def test_n98_n99_an_answer_sent_again_is_one(backend: Backend, journal: Journal) -> None:
    session, execution_id, (gate,) = await waiting(backend)
    good = request_of(session, one(gate.interaction_id, decision=ALLOWED))
    answers = await asyncio.gather(*(backend.sessions.AnswerInteractions(good) for _ in range(4)))
    assert {response.execution.execution_id for response in answers} == {execution_id}
    await backend.ending(session, execution_id)
    later = await backend.sessions.AnswerInteractions(good)
    assert later.interactions[0].state == sessions.INTERACTION_STATE_CONSUMED
    assert later.interactions[0].resolution == event_pb2.INTERACTION_RESOLUTION_CONSUMED
    changed = calls.AnswerInteractionsRequest()
    changed.CopyFrom(good)
    changed.answers[0].decision = DENIED
    error = await refused(backend.sessions.AnswerInteractions(changed))
    assert (error.code, error.reason) == (grpc.StatusCode.ALREADY_EXISTS, "REQUEST_ID_REUSED")
    assert journal.ran(execution_id) == ["edit"]


async def test_of_two_who_answer_at_once_one_is_heard(backend: Backend, journal: Journal) -> None:
    session, execution_id, (gate,) = await waiting(backend)
    results = await asyncio.gather(
        *(answer(backend, session, {gate.interaction_id: ALLOWED}, by=name) for name in ("ada", "bob", "eve")),
        return_exceptions=True,
    )
    won = [result for result in results if isinstance(result, calls.AnswerInteractionsResponse)]
    lost = [result for result in results if isinstance(result, grpc.aio.AioRpcError)]
    assert (len(won), len(lost)) == (1, 2)
    assert {error.code() for error in lost} == {grpc.StatusCode.FAILED_PRECONDITION}
    winner = won[0].interactions[0].answered_by
    await backend.ending(session, execution_id)
    assert (await resolved(backend, session))[gate.interaction_id].decided_by == winner
    late = await refused(answer(backend, session, {gate.interaction_id: DENIED}))
    assert (late.reason, late.metadata["state"], late.metadata["decision"]) == (
        "INTERACTION_CLOSED",
        "CONSUMED",
        "ALLOWED",
    )
    assert journal.ran(execution_id) == ["edit"]


async def test_who_answered_is_the_caller_unless_it_says_who(backend: Backend) -> None:
    session, execution_id, gates = await waiting(backend, "parallel ask a {}\nparallel ask b {}", 2)
    await backend.sessions.AnswerInteractions(request_of(session, one(gates[0].interaction_id, decision=ALLOWED)))
    await answer(backend, session, {gates[1].interaction_id: DENIED}, by="Ada, of the night shift")
    await backend.ending(session, execution_id)
    closed = await resolved(backend, session)
    assert [closed[gate.interaction_id].decided_by for gate in gates] == ["anonymous", "Ada, of the night shift"]


async def test_an_answer_that_does_not_fit_the_schema_is_refused_by_its_place(backend: Backend) -> None:
    schema = '{"type": "object", "properties": {"size": {"enum": ["s", "m"]}}, "required": ["size"]}'
    session, execution_id, (gate,) = await waiting(backend, f'hearth-ask {{"prompt": "Which?", "schema": {schema}}}')
    for wrong in ('{"size": "secret"}', "{}", '"s"'):
        error = await refused(answer(backend, session, {gate.interaction_id: wrong}))
        assert [name for name, _ in error.field_violations] == ["answers[0].answer_json"]
        assert "secret" not in str(error)
    error = await refused(answer(backend, session, {gate.interaction_id: ALLOWED}))
    assert "answers[0].decision" in [name for name, _ in error.field_violations]
    response = await answer(backend, session, {gate.interaction_id: '{"size": "m"}'})
    assert response.interactions[0].answer_json == '{"size": "m"}'
    assert (await backend.ending(session, execution_id)).HasField("execution_completed")


async def test_pages_and_filters_of_what_was_asked(backend: Backend) -> None:
    session, execution_id, gates = await waiting(backend, "\n".join(f"parallel ask tool-{n} {{}}" for n in range(5)), 5)
    await answer(backend, session, {gates[1].interaction_id: ALLOWED})
    found: list[sessions.Interaction] = []
    token = ""
    for _ in range(3):
        request = calls.ListInteractionsRequest(session=session, page_size=2, page_token=token)
        response = await backend.sessions.ListInteractions(request)
        found += response.interactions
        token = response.next_page_token
    assert token == ""
    assert [gate.interaction_id for gate in found] == [gate.interaction_id for gate in gates]
    pending = calls.ListInteractionsRequest(session=session, pending_only=True)
    tools = [gate.request.tool_name for gate in (await backend.sessions.ListInteractions(pending)).interactions]
    assert tools == ["tool-0", "tool-2", "tool-3", "tool-4"]
    assert (await backend.session(session)).open_interactions == 4
    for wrong in ("x", "W10=", "WyJhIiwiYiJd"):
        error = await refused(
            backend.sessions.ListInteractions(calls.ListInteractionsRequest(session=session, page_token=wrong))
        )
        assert [name for name, _ in error.field_violations] == ["page_token"]
    await answer(backend, session, {gate.interaction_id: DENIED for gate in gates if gate != gates[1]})
    await backend.ending(session, execution_id)


async def test_what_nobody_answers_in_time_is_denied_and_the_agent_goes_on(
    backend: Backend, database: asyncpg.Connection[asyncpg.Record], journal: Journal
) -> None:
    session, execution_id, (gate,) = await waiting(backend)
    await database.execute("UPDATE pool.gate SET expires_at = now() WHERE interaction_id = $1", gate.interaction_id)
    error = await refused(answer(backend, session, {gate.interaction_id: ALLOWED}))
    assert (error.reason, error.metadata["resolution"]) == ("INTERACTION_CLOSED", "EXPIRED")
    assert (await backend.ending(session, execution_id)).HasField("execution_completed")
    found = (await resolved(backend, session))[gate.interaction_id]
    assert (found.resolution, found.decided_by) == (event_pb2.INTERACTION_RESOLUTION_EXPIRED, "expiry")
    assert found.decision == event_pb2.DECISION_UNSPECIFIED
    assert journal.ran(execution_id) == []


async def test_a_deleted_session_takes_no_answer(backend: Backend) -> None:
    session, _, (gate,) = await waiting(backend)
    await backend.sessions.DeleteSession(calls.DeleteSessionRequest(session=session, request_id="d"), timeout=30)
    error = await refused(answer(backend, session, {gate.interaction_id: ALLOWED}))
    assert error.reason == "SESSION_DELETED"
    assert (await refused(interactions(backend, session))).reason == "SESSION_DELETED"


async def test_a_caller_that_hangs_up_and_asks_again_has_answered_once(backend: Backend) -> None:
    session, execution_id, (gate,) = await waiting(backend)
    good = request_of(session, one(gate.interaction_id, decision=ALLOWED))
    call = backend.sessions.AnswerInteractions(good)
    await call.wait_for_connection()
    call.cancel()
    response = await backend.sessions.AnswerInteractions(good)
    assert response.interactions[0].decision == ALLOWED
    assert (await backend.ending(session, execution_id)).HasField("execution_completed")
    told = [event for event in await backend.events(session) if event.HasField("interaction_answered")]
    assert len(told) == 1
