"""Who may answer what an agent asks, also while nothing but Postgres is there, and that the name of the token is told
as the one who decided."""

from __future__ import annotations

import json
import uuid
from pathlib import Path

import grpc.aio

from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.session.v1 import session_service_pb2_grpc
from hearth.types.v1 import event_pb2
from services.chassis.auth import hash_token
from services.pool.rows import Gate, GateState
from tests.conftest import StartService
from tests.contract.pool.refusals import refused
from tests.integration.test_sandbox_projects import Bearer
from tests.support.gates import new_key, rows_on

TOKENS = {"one": ("p", ["run", "read"]), "reader": ("p", ["read"]), "stranger": ("q", ["run", "read"])}


def answer_to(gate: Gate) -> calls.AnswerInteractionsRequest:
    """An approval."""
    return calls.AnswerInteractionsRequest(
        session=gate.key.message(),
        request_id=str(uuid.uuid4()),
        answers=[sessions.InteractionAnswer(interaction_id=gate.interaction_id, decision=event_pb2.DECISION_ALLOWED)],
    )


async def test_n102_an_answer_needs_a_right_and_nothing_else_that_could_be_away(
    start_service: StartService, migrated_dsn: str, scratch: Path
) -> None:
    key = new_key()
    tokens = {
        hash_token(name): {"name": f"backend {name}", "project": project, "scopes": scopes}
        for name, (project, scopes) in TOKENS.items()
    }
    (scratch / "auth.json").write_text(json.dumps(tokens))
    async with rows_on(migrated_dsn) as rows:
        _, (gate, other) = await rows.paused(key, 2)
        # History and the others do not answer, and nothing here has to wait for them.
        service = await start_service(
            "services.pool",
            HEARTH_POSTGRES_DSN=migrated_dsn,
            HEARTH_AUTH_FILE=str(scratch / "auth.json"),
            HEARTH_TOKEN="none",
            **{f"HEARTH_{name}_ADDRESS": "127.0.0.1:1" for name in ("HISTORY", "RELAY", "SANDBOX")},
        )
        channels = {name: grpc.aio.insecure_channel(service.address, interceptors=[Bearer(name)]) for name in TOKENS}
        stubs = {name: session_service_pb2_grpc.SessionServiceStub(channel) for name, channel in channels.items()}
        for name, reason in (("reader", "SCOPE_MISSING"), ("stranger", "PROJECT_DENIED")):
            error = await refused(stubs[name].AnswerInteractions(answer_to(gate), timeout=20))
            assert error.reason == reason
        listing = calls.ListInteractionsRequest(session=key.message())
        assert (await refused(stubs["stranger"].ListInteractions(listing, timeout=20))).reason == "PROJECT_DENIED"
        assert len((await stubs["reader"].ListInteractions(listing, timeout=20)).interactions) == 2
        assert [one.state for one in await rows.gates(gate, other)] == [GateState.PENDING] * 2

        await stubs["one"].AnswerInteractions(answer_to(gate), timeout=20)
        named = answer_to(other)
        named.answered_by = "ada"
        await stubs["one"].AnswerInteractions(named, timeout=20)
        assert [one.answered_by for one in await rows.gates(gate, other)] == ["backend one", "ada"]
        told = [event for event in await rows.events(key) if event.HasField("interaction_answered")]
        assert [event.interaction_answered.answered_by for event in told] == ["backend one", "ada"]
        # Neither the log nor a sandbox can be reached, and it goes on all the same.
        continuation = await rows.active(key)
        assert continuation is not None
        assert continuation.source_execution_id == gate.execution_id
        for channel in channels.values():
            await channel.close()
        # It would wait for a history that never comes.
        service.kill9()
