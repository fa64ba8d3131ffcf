"""The life of sandboxes on Daytona, through its real SDK against the stand-in, also while calls of its API go wrong.

S1 to S3 are judged by the stand-in's own journal: which sandboxes accepted harness traffic when, what ran, what is
left.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from hearth.sandbox.v1 import sandbox_pb2
from hearth.secret import Secret
from services.chassis.clock import SystemClock, SystemIds
from services.chassis.errors import HearthError
from services.chassis.migrations import migrate
from services.chassis.postgres import create_pool
from services.chassis.tasks import Tasks
from services.sandbox.acquire import Acquired
from services.sandbox.assembly import Parts, assemble
from services.sandbox.claims import Claim
from services.sandbox.compatibility import Spec
from services.sandbox.rows import Key
from services.sandbox.settings import SandboxSettings
from services.sandbox.starting import Want
from services.sandbox.states import Disposition, How
from tests.contract.provider.places import connect
from tests.support.daytona import Fault, Kind, RunningStandIn, StandIn
from tests.support.exhaustive import sampled
from tests.support.processes import MARKER as RUN_MARKER
from tests.support.processes import marker
from tests.support.sandboxes import INITIALIZE, Daemon, new_id

pytestmark = pytest.mark.exhaustive

CAP = 2
PROJECT = "p1"


class House:
    """The parts of a service over a stand-in."""

    def __init__(self, parts: Parts, stand_in: RunningStandIn, http: aiohttp.ClientSession) -> None:
        self.parts = parts
        self.stand_in = stand_in
        self.http = http
        self.me = new_id()

    async def acquire(self, session: str, epoch: int, *, holder: str = "", network: str = "") -> Acquired:
        spec = Spec(provider="daytona", agent="scripted", network=network)
        return await self.parts.acquirer.acquire(Want(Key(PROJECT, session), Claim(epoch, 1), holder or self.me, spec))

    async def release(self, session: str, epoch: int, reason: str = "CLEAN_TURN") -> Disposition:
        return (await self.parts.releaser.release(Key(PROJECT, session), Claim(epoch, 1), reason)).disposition

    async def health(self, answer: Acquired) -> int:
        endpoint = sandbox_pb2.Endpoint(url=answer.url, token=answer.token.reveal(), headers=dict(answer.headers))
        return await Daemon(self.http, endpoint).health()

    async def speaks(self, answer: Acquired) -> bool:
        """Whether its harness takes traffic for this token."""
        endpoint = sandbox_pb2.Endpoint(url=answer.url, token=answer.token.reveal(), headers=dict(answer.headers))
        try:
            status, _ = await Daemon(self.http, endpoint).post(new_id(), INITIALIZE, agent="scripted")
        except (aiohttp.ClientError, TimeoutError):
            return False
        return status == 200

    async def until_nothing_is_left(self) -> None:
        """Reconcile until rows and Daytona agree that nothing is there."""
        async with asyncio.timeout(60):
            while self.stand_in.sandboxes() or await self.parts.store.not_gone("daytona"):
                for row in await self.parts.store.not_gone("daytona"):
                    if not row.in_transition:
                        with contextlib.suppress(HearthError):
                            await self.parts.releaser.delete_sandbox(row.sandbox_id)
                await self.parts.reconciler.run(confirm_unknown=True)


@pytest.fixture(autouse=True)
def _marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is left running is found at the end of the run."""
    monkeypatch.setenv(RUN_MARKER, marker())


@pytest_asyncio.fixture
async def house(migrated_dsn: str, scratch: Path) -> AsyncIterator[House]:
    settings = SandboxSettings(
        postgres_dsn=Secret(migrated_dsn),
        local_root=scratch / "unused",
        providers=["daytona"],
        default_provider="daytona",
        daytona_api_key=Secret("given to the provider itself"),
        daytona_warm_cap=CAP,
        create_deadline=10.0,
        start_deadline=10.0,
        stop_deadline=5.0,
        delete_deadline=5.0,
        look_again=0.05,
    )
    await migrate(Secret(migrated_dsn), "sandbox", "services.sandbox")
    died: list[str] = []
    tasks = Tasks(died.append)
    async with (
        StandIn.running(scratch / "daytona", inherit=[RUN_MARKER]) as stand_in,
        await create_pool(settings, "sandbox") as pool,
        aiohttp.ClientSession() as http,
    ):
        provider = await connect(
            stand_in, scratch, create_seconds=8.0, start_seconds=8.0, stop_seconds=4.0, delete_seconds=4.0
        )
        parts = await assemble(
            settings,
            pool=pool,
            providers={"daytona": provider},
            session=http,
            tasks=tasks,
            clock=SystemClock(),
            ids=SystemIds(),
        )
        opened = House(parts, stand_in, http)
        try:
            yield opened
            stand_in.faults.clear()
            stand_in.release()
            await opened.until_nothing_is_left()
            assert stand_in.running() == 0
            assert stand_in.overlaps() == []
        finally:
            await tasks.stop()
            await provider.close()
    assert died == []


async def test_cold_then_warm_then_stopped_then_restarted_then_cold_again(house: House) -> None:
    cold = await house.acquire("s", 1)
    assert cold.how is How.CREATED
    assert await house.health(cold) == 200
    assert await house.release("s", 1) is Disposition.PARKED
    assert house.stand_in.running() == 1
    warm = await house.acquire("s", 2)
    assert (warm.how, warm.sandbox_id, warm.token) == (How.ATTACHED, cold.sandbox_id, cold.token)
    assert await house.release("s", 2, "IDLE_EXPIRED") is Disposition.STOPPED
    assert house.stand_in.running() == 0
    restarted = await house.acquire("s", 3)
    assert (restarted.how, restarted.sandbox_id) == (How.RESTARTED, cold.sandbox_id)
    assert await house.health(restarted) == 200
    assert await house.release("s", 3, "FAILED_TURN") is Disposition.DELETED
    assert house.stand_in.sandboxes() == []
    assert (await house.acquire("s", 4)).how is How.CREATED


async def test_another_holder_gets_the_sandbox_with_a_new_daemon(house: House) -> None:
    old = await house.acquire("s", 1)
    await house.release("s", 1)
    new = await house.acquire("s", 2, holder=new_id())
    assert (new.how, new.sandbox_id) == (How.RESTARTED, old.sandbox_id)
    assert await house.health(new) == 200
    assert await house.health(old) == 401


async def test_w_r04_another_network_policy_is_set_and_not_another_sandbox_made(house: House) -> None:
    first = await house.acquire("s", 1, network="OPEN")
    await house.release("s", 1)
    second = await house.acquire("s", 2, network="BLOCKED")
    assert (second.how, second.sandbox_id) == (How.RESTARTED, first.sandbox_id)
    assert len(house.stand_in.log.of("call", call="network")) == 1
    await house.release("s", 2)
    assert (await house.acquire("s", 3, network="BLOCKED")).how is How.ATTACHED
    assert len(house.stand_in.log.of("call", call="network")) == 1


async def test_w_r04_a_policy_that_cannot_be_set_costs_a_new_sandbox(house: House) -> None:
    first = await house.acquire("s", 1, network="OPEN")
    await house.release("s", 1)
    house.stand_in.faults.add(Fault("network", Kind.STATUS, status=403))
    second = await house.acquire("s", 2, network="BLOCKED")
    assert second.how is How.CREATED
    assert second.sandbox_id != first.sandbox_id
    assert len(house.stand_in.sandboxes()) == 1


@pytest.mark.parametrize("kind", [Kind.LOSE_REPLY, Kind.FAIL_AFTER])
async def test_a_create_whose_answer_was_lost_leaves_one(house: House, kind: Kind) -> None:
    house.stand_in.faults.add(Fault("create", kind, times=1, status=500))
    answer = await house.acquire("s", 1)
    assert await house.health(answer) == 200
    await house.parts.reconciler.run(confirm_unknown=False)
    assert [found.name for found in house.stand_in.sandboxes()] == [f"hearth-{answer.sandbox_id}"]


async def test_a_delete_that_fails_leaves_an_orphan_that_is_counted_and_reaped(house: House) -> None:
    await house.acquire("s", 1)
    switch = house.stand_in.faults.add(Fault("delete", Kind.STATUS, status=500))
    assert await house.release("s", 1, "KILLED") is Disposition.ORPHANED
    assert (await house.parts.store.orphans(None))[0] == 1
    assert house.stand_in.running() == 1
    # The session goes on; what could not be ended is its no more.
    second = await house.acquire("s", 2)
    assert second.how is How.CREATED
    house.stand_in.faults.remove(switch)
    await house.parts.reconciler.run(confirm_unknown=False)
    assert (await house.parts.store.orphans(None))[0] == 0
    assert [found.name for found in house.stand_in.sandboxes()] == [f"hearth-{second.sandbox_id}"]


async def test_one_that_died_by_itself_is_replaced(house: House) -> None:
    first = await house.acquire("s", 1)
    await house.release("s", 1)
    (sandbox,) = house.stand_in.sandboxes()
    house.stand_in.kill(sandbox.name)
    async with asyncio.timeout(20):
        while sandbox.state != "error":  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.01)
    again = await house.acquire("s", 2)
    assert again.how is How.CREATED
    assert await house.health(again) == 200
    assert [found.name for found in house.stand_in.sandboxes()] == [f"hearth-{again.sandbox_id}"]
    assert first.sandbox_id != again.sandbox_id


@pytest.mark.parametrize("seed", sampled([3, 4], every=2))
async def test_random_turns_while_every_call_goes_wrong_now_and_then(house: House, seed: int) -> None:
    """A turn may be refused with a reason, never get a second sandbox; in the end nothing is left (the fixture)."""
    house.stand_in.faults.everything(0.03, seed=seed, seconds=0.3)
    chance = random.Random(seed)
    served = 0
    refusals: set[str] = set()

    async def turns(session: str) -> None:
        nonlocal served
        before: Acquired | None = None
        for epoch in range(1, 6):
            holder = house.me if chance.random() < 0.7 else new_id()
            try:
                answer = await house.acquire(session, epoch, holder=holder)
            except HearthError as refusal:
                refusals.add(refusal.reason)
            else:
                # The one before tries too: if anything of it took traffic still, the journal would show it.
                served += await house.speaks(answer)
                if before is not None and before.token != answer.token:
                    assert not await house.speaks(before)
                before = answer
                served += await house.speaks(answer)
            await house.release(session, epoch, chance.choice(["CLEAN_TURN"] * 4 + ["IDLE_EXPIRED", "FAILED_TURN"]))
            assert (await house.parts.store.slots_used()).get("daytona", 0) <= CAP

    await asyncio.gather(*(turns(f"s{number}") for number in range(4)))
    assert served
    assert refusals <= {"PROVIDER_UNAVAILABLE", "DAEMON_UNREACHABLE", "PROVIDER_REFUSED"}
    assert house.stand_in.overlaps() == []
    assert sum(house.stand_in.faults.counts().values()) > 10, "it was no quiet day"
