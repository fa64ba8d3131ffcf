"""Races over the sandboxes of a session, between claims, holders and two replicas of the service: S1 to S3 hold.

Who lived when is told by the witness of the daemons and by the list of processes. No test depends on who wins a race:
each is played several times, and what must hold holds whoever wins.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from hearth.sandbox.v1 import sandbox_pb2, sandbox_service_pb2
from services.chassis.crashpoints import VARIABLE as CRASH_POINT
from services.chassis.errors import HearthError
from tests.faults.sandbox_scene import Scene, endings, scene, spec
from tests.support.exhaustive import sampled
from tests.support.processes import ServiceProcess
from tests.support.sandboxes import (
    Daemon,
    Sandboxes,
    alive,
    connected,
    disposition,
    how,
    members,
    new_id,
    refused,
    state,
    until,
)

CAP = 2
# Nothing lapses by itself in most of these; who wants that says so.
STEADY = {"HEARTH_LEASE": "60", "HEARTH_LEASE_GAP": "30", "HEARTH_LOCAL_WARM_CAP": str(CAP)}
Answer = sandbox_service_pb2.AcquireResponse


class House:
    """Two replicas, and calls to both in turn."""

    def __init__(self, found: Scene, services: list[ServiceProcess], calls: list[Sandboxes]) -> None:
        self.scene = found
        self.services = services
        self.calls = calls
        self.one, self.two = calls

    async def health(self, answer: Answer) -> int:
        """What the daemon answers to the token of `answer`."""
        async with aiohttp.ClientSession() as http:
            return await Daemon(http, answer.endpoint).health()

    async def check_one(self, answer: Answer) -> None:
        """`answer` is the one sandbox of its session: its daemon answers, and no other one lives."""
        assert await self.health(answer) == 200
        home = f"{answer.workspace}/.home"
        assert [one.sandbox_id for one in self.scene.witness.alive() if one.home == home] == [answer.sandbox_id]
        assert len(members(answer.sandbox_id)) == 1

    async def end(self) -> None:
        """All can be deleted, nothing is left, and no two daemons of a session ever lived at once."""
        await self.one.clear()
        self.scene.witness.check()
        assert self.scene.witness.alive() == []
        assert list(self.scene.root.glob("hearth-*")) == []


@pytest_asyncio.fixture
async def house(migrated_dsn: str, scratch: Path) -> AsyncIterator[House]:
    async with scene(migrated_dsn, scratch) as found:
        services = [found.service(**STEADY) for _ in range(2)]
        await asyncio.gather(*(service.start() for service in services))
        async with connected(services[0].address) as one, connected(services[1].address) as two:
            opened = House(found, services, [one, two])
            yield opened
            await opened.end()


async def test_two_acquires_of_one_claim_at_two_replicas_are_one(house: House) -> None:
    for epoch in (1, 2):
        answers = await asyncio.gather(
            *(house.calls[n % 2].acquire("s", epoch, holder=house.scene.me) for n in range(6))
        )
        assert len({(one.sandbox_id, one.endpoint.token, one.how) for one in answers}) == 1
        await house.check_one(answers[0])
        await house.two.release("s", epoch, reason="KILLED")
    assert len(house.scene.witness.started()) == 2, "one daemon for each claim"


@pytest.mark.parametrize("same_holder", sampled([False, True], every=2))
async def test_of_racing_claims_the_highest_has_the_sandbox(house: House, same_holder: bool) -> None:
    for turn in range(3):
        epochs = list(range(10 * turn + 1, 10 * turn + 5))
        random.Random(turn).shuffle(epochs)
        answers = await asyncio.gather(
            *(
                house.calls[n % 2].acquire("s", epoch, holder=house.scene.me if same_holder else new_id())
                for n, epoch in enumerate(epochs)
            ),
            return_exceptions=True,
        )
        assert set(endings(answers)) <= {"ok", "FENCED"}
        winner = answers[epochs.index(max(epochs))]
        assert isinstance(winner, Answer)
        await house.check_one(winner)
        for answer in answers:
            if not same_holder and isinstance(answer, Answer) and answer is not winner:
                assert await house.health(answer) in (0, 401), "a token of before opens nothing"
        (row,) = await house.one.list()
        assert (row.claim.epoch, row.sandbox_id) == (max(epochs), winner.sandbox_id)


async def test_an_acquire_during_a_park_gets_the_sandbox(house: House) -> None:
    answer = await house.one.acquire("s", 1, holder=house.scene.me)
    for epoch in range(1, 7):
        released, following = await asyncio.gather(
            house.calls[epoch % 2].release("s", epoch),
            house.calls[(epoch + 1) % 2].acquire("s", epoch + 1, holder=house.scene.me),
        )
        assert disposition(released) in ("PARKED", "NOTHING")
        assert (how(following), following.sandbox_id) == ("ATTACHED", answer.sandbox_id)
        await house.check_one(following)
        (slots,) = (await house.one.usage()).slots
        assert slots.used == 0, "what is in use holds no slot"


async def test_an_acquire_during_the_eviction_of_its_sandbox_gets_it_running_or_restarted(house: House) -> None:
    me = house.scene.me
    for turn in range(4):
        victim, other, outsider = sessions = [f"{name}{turn}" for name in ("victim", "other", "outsider")]
        first, *_ = await asyncio.gather(*(house.one.acquire(session, 1, holder=me) for session in sessions))
        for session in (victim, other):
            assert disposition(await house.one.release(session, 1)) == "PARKED"
        # The one that was used the longest ago has to go for the outsider, and at this moment it is wanted again.
        released, acquired = await asyncio.gather(
            house.calls[turn % 2].release(outsider, 1), house.calls[(turn + 1) % 2].acquire(victim, 2, holder=me)
        )
        assert disposition(released) in ("PARKED", "STOPPED")
        assert how(acquired) in ("ATTACHED", "RESTARTED")
        assert acquired.sandbox_id == first.sandbox_id
        await house.check_one(acquired)
        assert [state(row) for row in await house.one.list()].count("RUNNING/PARKED") <= CAP
        await asyncio.gather(*(house.one.release(session, 2, reason="KILLED") for session in sessions))


@pytest.mark.parametrize("reason", sampled(["KILLED", "CLEAN_TURN", "IDLE_EXPIRED"], every=3))
async def test_a_release_during_a_create_undoes_it_whoever_is_asked(house: House, reason: str) -> None:
    house.scene.faults.set("hold-created")
    acquiring = asyncio.create_task(house.one.acquire("s", 1, holder=house.scene.me))
    await house.scene.faults.entered("created")
    releasing = asyncio.create_task(house.two.release("s", 1, reason=reason))
    await house.scene.closed("s", 1)
    house.scene.faults.clear("hold-created")
    assert (await refused(acquiring)).reason == "FENCED"
    assert disposition(await releasing) == "DELETED"
    assert await house.one.list() == []
    assert house.scene.witness.started() == [], "it was undone before anything could run in it"
    await house.check_one(await house.two.acquire("s", 2, holder=house.scene.me))


async def test_a_kill_during_a_restart_does_not_wait_for_it(house: House) -> None:
    first = await house.one.acquire("s", 1, holder=new_id())
    await house.one.release("s", 1)
    house.scene.faults.set("hold-restart_daemon")
    acquiring = asyncio.create_task(house.one.acquire("s", 2, holder=house.scene.me))
    await house.scene.faults.entered("restart_daemon")
    assert disposition(await house.two.release("s", 2, reason="KILLED")) == "DELETED"
    assert members(first.sandbox_id) == []
    house.scene.faults.clear("hold-restart_daemon")
    assert (await refused(acquiring)).reason == "FENCED"
    assert members(first.sandbox_id) == []
    again = await house.two.acquire("s", 3, holder=house.scene.me)
    assert how(again) == "CREATED"
    await house.check_one(again)


@pytest.mark.exhaustive
async def test_a_kill_and_a_restart_at_any_time_leave_nothing_or_one(house: House) -> None:
    for turn in range(6):
        epoch = 10 * turn + 1
        await house.one.acquire("s", epoch, holder=new_id())
        await house.one.release("s", epoch)
        acquiring = asyncio.create_task(house.one.acquire("s", epoch + 1, holder=house.scene.me))
        await asyncio.sleep(random.Random(turn).uniform(0, 0.4))
        killed = disposition(await house.two.release("s", epoch + 1, reason="KILLED"))
        assert killed in ("DELETED", "NOTHING")
        await asyncio.wait([acquiring])
        assert acquiring.exception() is None or endings([acquiring.exception()]) == ["FENCED"]
        assert await house.one.list() == []
        assert house.scene.witness.alive() == []


async def test_a_holder_that_was_frozen_reaches_nothing_after_its_thaw(migrated_dsn: str, scratch: Path) -> None:
    async with scene(migrated_dsn, scratch) as found:
        service = await found.started()
        async with connected(service.address) as calls:
            # It goes silent with a parked and an active sandbox, as a frozen process does.
            frozen, awake = new_id(), new_id()
            parked = await calls.acquire("parked", 1, holder=frozen)
            active = await calls.acquire("active", 1, holder=frozen)
            await calls.release("parked", 1)

            async def ended() -> bool:
                rows = [state(await calls.get(answer.sandbox_id)) for answer in (parked, active)]
                return rows == ["STOPPED/FREE", "GONE/FREE"]

            await until(ended, seconds=60)
            assert found.witness.alive() == []
            new = {session: await calls.acquire(session, 2, holder=awake) for session in ("parked", "active")}
            # It thaws: everything that it still knows opens nothing, and what it releases is not its any more.
            outcomes = await calls.renew(frozen, ("parked", 1, 1), ("active", 1, 1))
            assert [one.outcome for one in outcomes] == [sandbox_pb2.RENEWAL_OUTCOME_FENCED] * 2
            async with aiohttp.ClientSession() as http:
                for old in (parked, active):
                    assert await Daemon(http, old.endpoint).health() in (0, 401)
            for session in new:
                assert (await refused(calls.acquire(session, 1, holder=frozen))).reason == "FENCED"
                for reason in ("CLEAN_TURN", "KILLED", "LOST"):
                    assert disposition(await calls.release(session, 1, reason=reason)) == "NOTHING"
            await calls.renew(awake, ("parked", 2, 1), ("active", 2, 1))
            live = {one.sandbox_id for one in found.witness.alive()}
            assert live == {answer.sandbox_id for answer in new.values()}
            await calls.clear()
        found.witness.check()


async def test_a_lease_that_runs_out_during_an_acquire_ends_it_only_when_its_caller_is_gone(
    migrated_dsn: str, scratch: Path
) -> None:
    async with scene(migrated_dsn, scratch) as found:
        service = await found.started()
        async with connected(service.address) as calls:
            found.faults.set("hold-restart_daemon")
            waiting = asyncio.create_task(calls.acquire("waiting", 1, holder=found.me))
            gone = asyncio.create_task(calls.acquire("gone", 1, holder=found.me))

            async def states(*wanted: str) -> bool:
                return sorted(state(row) for row in await calls.list()) == sorted(wanted)

            await until(lambda: states("STARTING/ACTIVE", "STARTING/ACTIVE"), seconds=60)
            gone.cancel()
            await asyncio.wait([gone])
            # Both creates hang for longer than a lease. One has a caller that waits for it.
            await until(lambda: states("STARTING/ACTIVE"), seconds=60)
            found.faults.clear("hold-restart_daemon")
            answer = await waiting
            assert [row.sandbox_id for row in await calls.list()] == [answer.sandbox_id]
            assert (await refused(calls.acquire("gone", 1, holder=found.me))).reason == "FENCED"
            assert how(await calls.acquire("gone", 2, holder=found.me)) == "CREATED"
            await calls.clear()
        found.witness.check()


@pytest.mark.parametrize(
    "point", sampled(["acquire.daemon_started", "acquire.created", "acquire.restart_written"], every=3)
)
async def test_a_replica_that_freezes_at_work_loses_it_and_harms_nothing_after_its_thaw(
    migrated_dsn: str, scratch: Path, point: str
) -> None:
    """It keeps its lock, so its deadline decides."""
    short = {**STEADY, "HEARTH_CREATE_DEADLINE": "2", "HEARTH_START_DEADLINE": "2"}
    async with scene(migrated_dsn, scratch) as found:
        awake = await found.started(**STEADY)
        frozen = await found.started(**short, **{CRASH_POINT: f"sandbox.{point}=stop"})
        async with connected(awake.address) as calls, connected(frozen.address) as lost_calls:
            epoch = 1
            if point == "acquire.restart_written":
                await calls.acquire("s", 1, holder=new_id())
                await calls.release("s", 1)
                epoch = 2
            late = asyncio.create_task(lost_calls.acquire("s", epoch, holder=found.me))
            await frozen.logs("crash point reached", timeout=60)
            answer = await calls.acquire("s", epoch, holder=found.me)
            frozen.thaw()
            # What it comes back with is what its claim has by now, or that it was late.
            await asyncio.wait([late])
            assert endings([late.exception()] if late.exception() else [late.result()]) in (["ok"], ["FENCED"])
            (row,) = await calls.list()
            final = await calls.acquire("s", epoch, holder=found.me)
            assert row.sandbox_id == final.sandbox_id
            if point != "acquire.restart_written":
                assert final.sandbox_id == answer.sandbox_id
            async with aiohttp.ClientSession() as http:
                assert await Daemon(http, final.endpoint).health() == 200
            assert [one.sandbox_id for one in found.witness.alive()] == [final.sandbox_id]
            await calls.clear()
        found.witness.check()


@pytest.mark.exhaustive
async def test_a_replica_that_freezes_while_it_reconciles_does_not_keep_the_other_from_it(
    migrated_dsn: str, scratch: Path
) -> None:
    async with scene(migrated_dsn, scratch) as found:
        # Another one than the first pass: it must be serving.
        frozen = await found.started(**{CRASH_POINT: "sandbox.reconcile.listed@4=stop"})
        await frozen.logs("crash point reached", timeout=60)
        awake = await found.started()
        name = await found.stranger(await found.deployment())
        async with connected(awake.address) as calls:

            async def gone() -> bool:
                return not (found.root / name).exists() and await calls.list() == []

            await until(gone, seconds=60)
        frozen.thaw()


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", sampled([11, 12], every=2))
async def test_random_turns_of_many_sessions_over_two_replicas_keep_to_the_cap(house: House, seed: int) -> None:
    """S3 from processes: of the sessions whose release said PARKED, never more than the cap have a living daemon."""
    chance = random.Random(seed)
    epochs = {f"s{number}": 0 for number in range(5)}
    idle: set[str] = set()
    homes: dict[str, str] = {}

    def parked() -> int:
        return len([one for one in house.scene.witness.alive() if one.home in {homes[session] for session in idle}])

    async def turns(session: str) -> None:
        for _ in range(6):
            epochs[session] += 1
            idle.discard(session)
            holder = house.scene.me if chance.random() < 0.7 else new_id()
            answer = await chance.choice(house.calls).acquire(session, epochs[session], holder=holder)
            homes[session] = f"{answer.workspace}/.home"
            assert await house.health(answer) == 200
            reason = chance.choice(["CLEAN_TURN"] * 5 + ["IDLE_EXPIRED", "FAILED_TURN"])
            done = disposition(await chance.choice(house.calls).release(session, epochs[session], reason=reason))
            if done == "PARKED":
                idle.add(session)
            elif done in ("STOPPED", "DELETED"):
                assert members(answer.sandbox_id) == []
            assert parked() <= CAP

    await asyncio.gather(*(turns(session) for session in epochs))
    assert parked() <= CAP
    running = [row for row in await house.one.list() if state(row) == "RUNNING/PARKED"]
    assert len(house.scene.witness.alive()) == len(running) <= CAP


@pytest.mark.exhaustive
async def test_a_lower_cap_is_kept_after_a_restart(migrated_dsn: str, scratch: Path) -> None:
    async with scene(migrated_dsn, scratch) as found:
        service = await found.started(**{**STEADY, "HEARTH_LOCAL_WARM_CAP": "3"})
        async with connected(service.address) as calls:
            for number in range(3):
                await calls.acquire(f"s{number}", holder=found.me)
                assert disposition(await calls.release(f"s{number}")) == "PARKED"
        service.kill9()
        service = await found.started(**{**STEADY, "HEARTH_LOCAL_WARM_CAP": "1"})
        async with connected(service.address) as calls:

            async def one_is_kept() -> bool:
                (slots,) = (await calls.usage()).slots
                return slots.cap == slots.used == len(found.witness.alive()) == 1

            await until(one_is_kept, seconds=60)
            await calls.clear()


async def test_a_network_policy_is_in_force_before_anything_runs_under_it(house: House) -> None:
    def wanted(mode: int, *allow: str) -> sandbox_pb2.SandboxSpec:
        policy = sandbox_pb2.NetworkPolicy(mode=mode, allow=allow)  # type: ignore[arg-type]
        return spec(network=policy)

    me = house.scene.me
    listed = sandbox_pb2.NETWORK_MODE_ALLOW_LIST
    first = await house.one.acquire("s", 1, holder=me, spec=wanted(sandbox_pb2.NETWORK_MODE_OPEN))
    before = {process.pid for process in members(first.sandbox_id)}
    await house.one.release("s", 1)
    # Another policy: the same sandbox, another daemon, and nothing of before that could hold a connection.
    second = await house.one.acquire("s", 2, holder=me, spec=wanted(listed, "10.0.0.0/8", "192.168.0.0/16"))
    assert (how(second), second.sandbox_id) == ("RESTARTED", first.sandbox_id)
    assert "network" in [stage.stage for stage in second.timings.stages]
    written = house.scene.root / f"hearth-{first.sandbox_id}" / "network"
    assert written.read_text() == "ALLOW_LIST 10.0.0.0/8 192.168.0.0/16"
    assert not any(alive(pid) for pid in before)
    await house.one.release("s", 2)
    # The same in another order is the same.
    third = await house.one.acquire("s", 3, holder=me, spec=wanted(listed, "192.168.0.0/16", "10.0.0.0/8"))
    assert how(third) == "ATTACHED"
    await house.one.release("s", 3, reason="IDLE_EXPIRED")
    # Also when it is started; one that cannot be set is not run with: there is a new sandbox instead.
    house.scene.faults.set("fail-set_network")
    fourth = await house.one.acquire("s", 4, holder=me, spec=wanted(sandbox_pb2.NETWORK_MODE_BLOCKED))
    assert how(fourth) == "CREATED"
    assert fourth.sandbox_id != first.sandbox_id
    assert members(first.sandbox_id) == []
    house.scene.faults.clear("fail-set_network")
    await house.check_one(fourth)


async def test_answers_that_fail_name_their_reason(house: House) -> None:
    house.scene.faults.set("fail-create")
    with pytest.raises(HearthError) as caught:
        await house.one.acquire("s", 1, holder=house.scene.me)
    assert caught.value.reason == "PROVIDER_UNAVAILABLE"
    house.scene.faults.clear("fail-create")
    assert await house.one.list() == []
