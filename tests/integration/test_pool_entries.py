"""What the pool asks of the sandbox service for its entries: in which order, under which claims, for which reasons.

Never two sandboxes of a session at a time, so a test may say of any run: no Acquire begins while another call about
the session is under way.
"""

from __future__ import annotations

import asyncio
import json
import sys
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc.aio
import psutil
import pytest
import pytest_asyncio

from hearth.pool.v1 import pool_pb2, pool_service_pb2, replica_service_pb2, replica_service_pb2_grpc
from hearth.sandbox.v1 import sandbox_pb2
from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import event_pb2, session_pb2
from services.pool.sealing import new_key
from tests.contract.pool.house import Backend, House, agent_text, eventually, frozen, key, summary
from tests.support.sandbox_recorder import SandboxRecorder, recorded
from tests.support.servers import Servers

SCRIPTED = [sys.executable, "-m", "hearth.agents.scripted"]
# An agent whose second and third start fail.
STUMBLING = [
    *("sh", "-c"),
    'n=$(cat "$HOME/starts" 2>/dev/null || echo 0); echo $((n + 1)) >"$HOME/starts"; case $n in 1 | 2) exit 3 ;; esac;'
    f' exec "{sys.executable}" -m hearth.agents.scripted',
]


class Recorded:
    """Services whose pool is recorded."""

    def __init__(self, house: House, backend: Backend, recorder: SandboxRecorder) -> None:
        self.house = house
        self.backend = backend
        self.recorder = recorder

    async def entries(self) -> dict[tuple[str, str], str]:
        """State of each entry."""
        found = await self.backend.pools.ListEntries(pool_service_pb2.ListEntriesRequest(), timeout=20)
        return {
            (entry.session.project, entry.session.session): pool_pb2.EntryState.Name(entry.state).removeprefix(
                "ENTRY_STATE_"
            )
            for entry in found.entries
        }

    async def until_told(self, session: session_pb2.SessionKey, *told: str) -> None:
        """Wait until exactly this was asked about a session, and all of it answered."""

        async def all_told() -> bool:
            about = self.recorder.about(session)
            return [str(call) for call in about] == list(told) and all(call.ended for call in about)

        try:
            await eventually(all_told)
        except TimeoutError:
            raise AssertionError(f"told was {self.recorder.told(session)}, not {list(told)}") from None
        self.check(session)

    def check(self, session: session_pb2.SessionKey) -> None:
        """No sandbox of a session is asked for while another call about it is under way."""
        about = self.recorder.about(session)
        for call in about:
            if call.method == "Acquire":
                rivals = [
                    other
                    for other in about
                    if other is not call and other.begun < call.begun and not 0 < other.ended < call.begun
                ]
                assert not rivals, f"{call} began during {rivals}"
        claims = [call.claim for call in about if call.method == "Acquire"]
        assert claims == sorted(set(claims)), claims


@asynccontextmanager
async def recorded_house(servers: Servers, **env: str) -> AsyncIterator[Recorded]:
    """Services of their own, with the recorder before their sandbox service."""
    dsn = servers.create_database(migrated=True)
    agents = {
        "other": {"command": SCRIPTED, "env": {"MODEL_KEY": "for all"}},
        "broken": {"command": ["false"]},
        "stumbling": {"command": STUMBLING},
    }
    house = House(
        servers.scratch(),
        dsn,
        servers.empty_valkey(),
        {"HEARTH_SECRET_KEY": new_key(), "HEARTH_AGENTS": json.dumps(agents), **env},
    )
    try:
        for name in ("history", "relay", "sandbox"):
            process = house.processes[name]
            if name == "relay":
                process.env["HEARTH_HISTORY_ADDRESS"] = house.processes["history"].address
            await asyncio.to_thread(process.start_blocking)
        async with recorded(house.processes["sandbox"].address) as (recorder, address):
            pool = house.pool
            pool.env["HEARTH_SANDBOX_ADDRESS"] = address
            for name in ("history", "relay"):
                pool.env[f"HEARTH_{name.upper()}_ADDRESS"] = house.processes[name].address
            await asyncio.to_thread(pool.start_blocking)
            backend = Backend(house)
            try:
                yield Recorded(house, backend, recorder)
            finally:
                await backend.close()
                if pool.running:
                    await asyncio.to_thread(pool.stop)
    finally:
        await asyncio.to_thread(house.stop)
        servers.drop_database(dsn)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(servers: Servers) -> AsyncIterator[Recorded]:
    """One for the tests that need nothing special."""
    async with recorded_house(servers) as found:
        yield found


pytestmark = pytest.mark.asyncio(loop_scope="module")


def agent_of(event: event_pb2.Event) -> int:
    """The process that answered."""
    pid: int = json.loads(summary(event).agent_report_json)["hearth.dev/agent"]["pid"]
    return pid


async def test_w_d01_w_p23_a_cold_turn_is_kept_and_the_next_one_goes_on_in_it(shared: Recorded) -> None:
    session = key()
    first = await shared.backend.run(session, "hello")
    second = await shared.backend.run(session, "hello")
    await shared.until_told(session, "Acquire", "Release CLEAN_TURN", "Acquire", "Release CLEAN_TURN")
    how = [call.answer.how for call in shared.recorder.about(session) if call.method == "Acquire"]
    assert how == [sandbox_pb2.ACQUIRE_HOW_CREATED, sandbox_pb2.ACQUIRE_HOW_ATTACHED]
    assert agent_of(first) == agent_of(second)
    assert (await shared.entries())[(session.project, session.session)] == "IDLE"


def with_key(session: session_pb2.SessionKey, **more: Any) -> sessions.SessionSpec:
    """A spec whose agent is given the credential of its session."""
    bound = sessions.CredentialBinding(credential=session.session, target="MODEL_KEY")
    return sessions.SessionSpec(credentials=[bound], **more)


async def other_config(here: Recorded, session: session_pb2.SessionKey) -> dict[str, Any]:
    return {"spec": with_key(session, instructions="Be brief.")}


async def other_history(here: Recorded, session: session_pb2.SessionKey) -> dict[str, Any]:
    return {"expected": sessions.ExpectedTranscript()}


async def other_credentials(here: Recorded, session: session_pb2.SessionKey) -> dict[str, Any]:
    await put(here, session.session, "two")
    return {}


async def all_of_them(here: Recorded, session: session_pb2.SessionKey) -> dict[str, Any]:
    """The configuration is looked at first: whatever else differs, that is the reason."""
    await other_credentials(here, session)
    return {**await other_history(here, session), **await other_config(here, session)}


async def history_and_credentials(here: Recorded, session: session_pb2.SessionKey) -> dict[str, Any]:
    await other_credentials(here, session)
    return await other_history(here, session)


async def put(here: Recorded, name: str, value: str) -> None:
    """Store a credential."""
    request = calls.PutCredentialRequest(project="acme", request_id=str(uuid.uuid4()), name=name, value=value)
    await here.backend.sessions.PutCredential(request, timeout=20)


@pytest.mark.parametrize(
    ("change", "reason", "how"),
    [
        (other_config, "SESSION_INCOMPATIBLE", "restarted"),
        (other_history, "CONTINUITY_INVALID", "restarted"),
        (other_credentials, "RUNTIME_INCOMPATIBLE", "cold"),
        (all_of_them, "SESSION_INCOMPATIBLE", "cold"),
        (history_and_credentials, "CONTINUITY_INVALID", "cold"),
    ],
    ids=["config", "history", "credentials", "all", "history-and-credentials"],
)
async def test_w_d04_w_d11_w_p19_what_does_not_fit_is_closed_first_with_its_reason(
    shared: Recorded,
    change: Callable[[Recorded, session_pb2.SessionKey], Awaitable[dict[str, Any]]],
    reason: str,
    how: str,
) -> None:
    session = key()
    await put(shared, session.session, "one")
    first = await shared.backend.run(session, "remember my name is Ada", spec=with_key(session))
    await shared.backend.idle_entry(session)
    second = await shared.backend.run(session, "what is my name?", **await change(shared, session))
    await shared.until_told(
        session, "Acquire", "Release CLEAN_TURN", f"Release {reason}", "Acquire", "Release CLEAN_TURN"
    )
    assert summary(second).how == how
    assert agent_of(second) != agent_of(first)
    assert "Ada" in agent_text(await shared.backend.events(session), second.execution_id)


async def test_a_credential_goes_before_what_the_deployment_says_for_all(shared: Recorded) -> None:
    session = key()
    await put(shared, session.session, "for this one")
    own = await shared.backend.run(session, "hello", spec=with_key(session, agent="other"))
    of_all = await shared.backend.run(key(), "hello", spec=sessions.SessionSpec(agent="other"))
    assert psutil.Process(agent_of(own)).environ()["MODEL_KEY"] == "for this one"
    assert psutil.Process(agent_of(of_all)).environ()["MODEL_KEY"] == "for all"


async def test_a_turn_that_never_reached_the_agent_makes_it_unfit(shared: Recorded) -> None:
    session = key()
    await shared.backend.run(session, "remember my name is Ada")
    await shared.backend.idle_entry(session)
    with frozen(shared.house, "history"):
        sent = await shared.backend.send(session, "my name is Eve now")
        await shared.backend.stop(session, sent.started.execution.execution_id)
    await shared.backend.settled(session, sent.started.execution.execution_id)
    await shared.backend.run(session, "hello")
    # It is parked after its reader has seen the ending.
    await shared.backend.idle_entry(session)
    told = shared.recorder.told(session)
    assert told[:2] == ["Acquire", "Release CLEAN_TURN"]
    assert told[-3:] == ["Release CONTINUITY_INVALID", "Acquire", "Release CLEAN_TURN"]
    shared.check(session)


async def test_w_d10_a_continuation_that_fails_unseen_is_tried_once_more_cold(shared: Recorded) -> None:
    session = key()
    first = await shared.backend.run(session, "remember my name is Ada")
    await shared.backend.idle_entry(session)
    psutil.Process(agent_of(first)).kill()
    second = await shared.backend.run(session, "what is my name?")
    assert second.HasField("execution_completed")
    await shared.until_told(
        session, "Acquire", "Release CLEAN_TURN", "Acquire", "Release FAILED_TURN", "Acquire", "Release CLEAN_TURN"
    )
    epochs = [call.claim for call in shared.recorder.about(session) if call.method == "Acquire"]
    assert epochs[1:] == [(epochs[1][0], 1), (epochs[1][0], 2)]
    started = [event for event in await shared.backend.events(session) if event.HasField("execution_started")]
    assert len(started) == 2


async def test_a_turn_that_was_stopped_before_its_agent_was_asked_is_told_to_the_next_one(shared: Recorded) -> None:
    """Its row was RUNNING in the session of an agent that was gone; the record of that has nothing of it."""
    session = key()
    first = await shared.backend.run(session, "remember my name is Ada")
    await shared.backend.idle_entry(session)
    psutil.Process(agent_of(first)).kill()

    async def hold_the_next() -> None:
        shared.recorder.hold("Acquire")

    shared.recorder.after_acquire[session.project, session.session] = hold_the_next
    sent = await shared.backend.send(session, "remember my town is Rome")
    execution_id = sent.started.execution.execution_id

    async def starts_over() -> bool:
        return shared.recorder.told(session).count("Acquire") == 3

    await eventually(starts_over)
    assert (await shared.backend.execution(session, execution_id)).state == sessions.EXECUTION_STATE_RUNNING
    await shared.backend.stop(session, execution_id)
    assert (await shared.backend.ending(session, execution_id)).HasField("execution_stopped")
    shared.recorder.release("Acquire")
    ending = await shared.backend.run(session, "what is my town?")
    assert "Rome" in agent_text(await shared.backend.events(session), ending.execution_id)
    shared.check(session)


@pytest.mark.exhaustive
async def test_a_renewal_of_the_claim_before_costs_the_next_turn_nothing(shared: Recorded) -> None:
    """The claim of the last turn is renewed, and refused, while that of the next one is on its way."""
    session = key()
    await shared.backend.run(session, "hello")
    await shared.backend.idle_entry(session)
    refused = shared.recorder.refused_renewal(session)

    async def until_refused() -> None:
        await refused.wait()

    shared.recorder.after_acquire[session.project, session.session] = until_refused
    warm = await shared.backend.run(session, "hello")
    assert refused.is_set()
    assert summary(warm).how == "warm"
    await shared.until_told(session, "Acquire", "Release CLEAN_TURN", "Acquire", "Release CLEAN_TURN")


async def test_an_eviction_below_the_epoch_of_a_turn_leaves_its_agent_alone(shared: Recorded) -> None:
    """It comes late, when the turn has taken the agent and its own claim is still to come."""
    session, backend = key(), shared.backend
    await backend.run(session, "hello")
    await backend.idle_entry(session)
    (replica,) = (await backend.pools.ListReplicas(pool_service_pb2.ListReplicasRequest())).replicas
    said = sessions.TranscriptEntry(user_message=sessions.TranscriptUserMessage(text="hello"))

    async def is_taken() -> bool:
        return (await shared.entries())[session.project, session.session] == "BUSY"

    async with grpc.aio.insecure_channel(shared.house.pool.address) as channel:
        with frozen(shared.house, "history"):
            sent = await backend.send(session, "hello again", expected=sessions.ExpectedTranscript(entries=[said]))
            await eventually(is_taken)
            nudge = replica_service_pb2.NudgeRequest(
                session=session,
                epoch=sent.started.execution.epoch,
                reason=pool_pb2.NUDGE_REASON_EVICT,
                holder=replica.holder,
            )
            answer = await replica_service_pb2_grpc.ReplicaServiceStub(channel).Nudge(nudge, timeout=20)
            assert answer.receipt == pool_pb2.NUDGE_RECEIPT_NOT_HELD
    ending = await backend.ending(session, sent.started.execution.execution_id)
    assert summary(ending).how == "warm"


async def test_w_d10_after_the_first_output_the_failure_stands(shared: Recorded) -> None:
    session = key()
    await shared.backend.run(session, "hello")
    await shared.backend.idle_entry(session)
    failed = await shared.backend.run(session, "stream 3 words\ncrash 3")
    assert failed.execution_failed.code == "AGENT_EXITED"
    await shared.until_told(session, "Acquire", "Release CLEAN_TURN", "Acquire", "Release FAILED_TURN")


async def test_w_d10_a_cold_turn_is_never_tried_again(shared: Recorded) -> None:
    session = key()
    failed = await shared.backend.run(session, "crash 3")
    assert failed.HasField("execution_failed")
    await shared.until_told(session, "Acquire", "Release FAILED_TURN")


async def test_w_k01_w_p21_a_kill_ends_the_session_of_its_project_only(shared: Recorded) -> None:
    mine = key()
    theirs = session_pb2.SessionKey(project="other", session=mine.session)
    for session in (mine, theirs):
        await shared.backend.run(session, "hello")
        await shared.backend.idle_entry(session)
    for _ in range(2):
        await shared.backend.sessions.KillSession(calls.KillSessionRequest(session=mine, request_id="k"), timeout=20)
    entries = await shared.entries()
    assert ("acme", mine.session) not in entries
    assert entries[("other", mine.session)] == "IDLE"
    assert "Release KILLED" in shared.recorder.told(mine)
    assert shared.recorder.told(theirs) == ["Acquire", "Release CLEAN_TURN"]
    assert summary(await shared.backend.run(theirs, "hello")).how == "warm"
    assert summary(await shared.backend.run(mine, "hello")).how == "cold"


async def test_an_agent_whose_claim_does_not_stand_is_dropped_and_nothing_is_asked_for_it(shared: Recorded) -> None:
    gone, fenced, kept = key("gone"), key("fenced"), key("kept")
    for session in (gone, fenced, kept):
        await shared.backend.run(session, "hello")
        await shared.backend.idle_entry(session)
    shared.recorder.lost[gone.project, gone.session] = sandbox_pb2.RENEWAL_OUTCOME_GONE
    shared.recorder.lost[fenced.project, fenced.session] = sandbox_pb2.RENEWAL_OUTCOME_FENCED

    async def dropped() -> bool:
        entries = await shared.entries()
        return not {(one.project, one.session) for one in (gone, fenced)} & entries.keys()

    await eventually(dropped)
    shared.recorder.lost.clear()
    assert (await shared.entries())[kept.project, kept.session] == "IDLE"
    for session in (gone, fenced):
        assert shared.recorder.told(session) == ["Acquire", "Release CLEAN_TURN"]
    # The sandbox service itself never gave the claim up, so its daemon is there, and no agent of ours in it any more.
    after = await shared.backend.run(gone, "hello")
    assert after.HasField("execution_completed")
    assert summary(after).how == "cold"


async def test_an_agent_that_does_not_open_in_a_kept_sandbox_costs_a_cold_start(shared: Recorded) -> None:
    session, spec = key(), sessions.SessionSpec(agent="stumbling")
    first = await shared.backend.run(session, "remember my name is Ada", spec=spec)
    await shared.until_told(session, "Acquire", "Release CLEAN_TURN")
    evict = pool_service_pb2.EvictEntryRequest(session=session, request_id="evict")
    await shared.backend.pools.EvictEntry(evict, timeout=20)
    second = await shared.backend.run(session, "what is my name?", spec=spec)
    assert (summary(first).how, summary(second).how) == ("cold", "cold")
    assert second.HasField("execution_completed"), second
    assert "Ada" in agent_text(await shared.backend.events(session), second.execution_id)
    first_turn, second_turn = ["Acquire", "Release CLEAN_TURN"], ["Acquire", "Release FAILED_TURN", "Acquire"]
    await shared.until_told(session, *first_turn, "Release CAPACITY", *second_turn, "Release CLEAN_TURN")
    how = [call.answer.how for call in shared.recorder.about(session) if call.method == "Acquire"]
    assert how[-2:] == [sandbox_pb2.ACQUIRE_HOW_RESTARTED, sandbox_pb2.ACQUIRE_HOW_CREATED]


async def test_w_e07_a_configuration_that_could_not_be_applied_is_not_taken_for_applied(shared: Recorded) -> None:
    session, broken = key(), sessions.SessionSpec(agent="broken")
    await shared.backend.run(session, "remember my name is Ada")
    for _ in range(2):
        failed = await shared.backend.run(session, "hello", spec=broken)
        assert failed.execution_failed.code in {"AGENT_START_FAILED", "AGENT_EXITED"}
        assert (await shared.entries()).get((session.project, session.session)) in {None, "DRAINING"}
    after = await shared.backend.run(session, "what is my name?", spec=sessions.SessionSpec())
    assert summary(after).how != "warm"
    assert "Ada" in agent_text(await shared.backend.events(session), after.execution_id)
    assert (
        summary(await shared.backend.run(session, "hello", spec=sessions.SessionSpec(agent="scripted"))).how == "warm"
    )


async def test_w_e04_only_the_author_of_the_last_turn_loads_its_record(shared: Recorded) -> None:
    session, other = key(), sessions.SessionSpec(agent="other")
    opened = []
    for text, spec in (
        ("remember my name is Ada", sessions.SessionSpec()),
        ("what is my name?", other),
        ("remember my town is Rome", None),
        ("what is my name?", sessions.SessionSpec()),
    ):
        ending = await shared.backend.run(session, text, spec=spec)
        opened.append({stage.stage: stage.how for stage in summary(ending).stages}["open"])
    # The first agent has a record of its own, and it lacks what the other one was told since.
    assert opened == ["new", "new", "continue", "new"]
    events = await shared.backend.events(session)
    assert "Ada" in agent_text(events, ending.execution_id)
    assert json.loads(summary(ending).agent_report_json)["hearth.dev/agent"]["session_loaded"] is False


@pytest_asyncio.fixture(loop_scope="module")
async def small(servers: Servers) -> AsyncIterator[Recorded]:
    """A pool with two seats."""
    async with recorded_house(servers, HEARTH_POOL_ENTRIES="2") as found:
        yield found


@pytest.mark.exhaustive
async def test_w_p04_w_p06_w_p25_the_bound_of_entries_holds(small: Recorded) -> None:
    a, b, c, d = (key(name) for name in "abcd")
    for session in (a, b):
        await small.backend.run(session, "hello")
        await small.backend.idle_entry(session)
    await small.backend.run(a, "hello")
    await small.backend.idle_entry(a)
    await small.backend.run(c, "hello")
    await small.backend.idle_entry(c)
    await small.until_told(b, "Acquire", "Release CLEAN_TURN", "Release CAPACITY")
    assert {session for _, session in await small.entries()} == {a.session, c.session}

    # Both at work: one more turn succeeds, and its agent goes with it.
    sent = [await small.backend.send(session, "sleep 3") for session in (a, c)]

    async def both_busy() -> bool:
        return list((await small.entries()).values()) == ["BUSY", "BUSY"]

    await eventually(both_busy)
    last = await small.backend.run(d, "hello")
    assert last.HasField("execution_completed")
    await small.until_told(d, "Acquire", "Release CAPACITY")
    for session, one in zip((a, c), sent, strict=True):
        assert (await small.backend.ending(session, one.started.execution.execution_id)).HasField("execution_completed")
    assert "Release CAPACITY" not in small.recorder.told(a) + small.recorder.told(c)
    assert summary(await small.backend.run(b, "hello")).how == "restarted"


@pytest.mark.exhaustive
async def test_w_p20_w_k03_at_the_end_idle_ones_are_stopped_and_those_at_work_deleted(servers: Servers) -> None:
    async with recorded_house(servers, HEARTH_SHUTDOWN_GRACE="12") as here:
        idle, busy = key("idle"), key("busy")
        await here.backend.run(idle, "hello")
        await here.backend.idle_entry(idle)
        sent = await here.backend.send(busy, "hang-hard")

        async def asked() -> bool:
            execution = await here.backend.execution(busy, sent.started.execution.execution_id)
            return execution.state == sessions.EXECUTION_STATE_RUNNING

        await eventually(asked)
        assert await here.house.pool.terminate() == 0
        await here.until_told(idle, "Acquire", "Release CLEAN_TURN", "Release SHUTDOWN_IDLE")
        assert here.recorder.told(busy)[-1] == "Release SHUTDOWN_IN_FLIGHT"
        here.check(busy)
