"""kill -9 of the sandbox service at every point at which something is half done: S1 to S3 hold, and it settles.

The points come from the registry of the code. Each has a story here that leads a real service to it; a point without a
story, and a story that does not reach its point, fail. What was left is judged by processes, not by rows. First nobody
asks: a service that is started again must end it all by itself. Then somebody does, and must get one sandbox.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import services.sandbox.assembly  # noqa: F401 - declares the points
from hearth.sandbox.v1 import sandbox_pb2
from services.chassis import crashpoints
from tests.faults.sandbox_scene import Scene, armed, died, scene, spec, tried
from tests.support.exhaustive import sampled
from tests.support.processes import ServiceProcess
from tests.support.sandboxes import Sandboxes, connected, members, new_id

OPEN = sandbox_pb2.NetworkPolicy(mode=sandbox_pb2.NETWORK_MODE_OPEN)
BLOCKED = sandbox_pb2.NetworkPolicy(mode=sandbox_pb2.NETWORK_MODE_BLOCKED)
SESSION = "s"


class Stage:
    """One scene with a service that will die at `point`, as soon as a story starts it."""

    def __init__(self, found: Scene, point: str) -> None:
        self.scene = found
        self.point = point
        self.sandbox_id = ""

    async def doomed(self, **more: str) -> ServiceProcess:
        """A serving service that has its end before it."""
        return await self.scene.started(**armed(self.point), **more)

    async def calls(self, story: Callable[[Sandboxes], Awaitable[None]], **more: str) -> None:
        """Calls to such a service."""
        service = await self.doomed(**more)
        async with connected(service.address) as calls:
            await story(calls)
            await died(service, self.point)

    async def before(self, story: Callable[[Sandboxes], Awaitable[None]], **more: str) -> None:
        """Calls to a service that is ended by kill -9 afterwards, without a point."""
        service = await self.scene.started(**more)
        async with connected(service.address) as calls:
            await story(calls)
        service.kill9()

    async def by_itself(self, **more: str) -> None:
        """A service that comes to its point without being asked for anything."""
        service = self.scene.service(**armed(self.point), **more)
        service.launch()
        await died(service, self.point)

    async def acquire(self, calls: Sandboxes, epoch: int = 1, *, session: str = SESSION, **fields: object) -> None:
        """Acquire for the holder of the scene."""
        answer = await tried(calls.acquire(session, epoch, holder=self.scene.me, spec=spec(**fields)))
        if answer is not None:
            self.sandbox_id = answer.sandbox_id

    async def release(self, calls: Sandboxes, reason: str, epoch: int = 1, *, session: str = SESSION) -> None:
        """Release."""
        await tried(calls.release(session, epoch, reason=reason))


Story = Callable[[Stage], Awaitable[None]]
STORIES: dict[str, Story] = {}


def story(*points: str) -> Callable[[Story], Story]:
    """The story of these points."""

    def keep(told: Story) -> Story:
        STORIES.update({f"sandbox.{point}": told for point in points})
        return told

    return keep


@story(
    "acquire.admitted",
    "acquire.intent_written",
    "acquire.created",
    "acquire.starting_written",
    "acquire.daemon_started",
    "acquire.probed",
    "acquire.up_written",
    "acquire.answering",
)
async def a_first_acquire(stage: Stage) -> None:
    await stage.calls(stage.acquire)


@story("acquire.attached_written")
async def a_warm_acquire(stage: Stage) -> None:
    async def tell(calls: Sandboxes) -> None:
        await stage.acquire(calls)
        await stage.release(calls, "CLEAN_TURN")
        await stage.acquire(calls, 2)

    await stage.calls(tell)


@story("acquire.restart_written")
async def another_holder(stage: Stage) -> None:
    async def tell(calls: Sandboxes) -> None:
        await stage.acquire(calls)
        await stage.release(calls, "CLEAN_TURN")
        await tried(calls.acquire(SESSION, 2, holder=new_id()))

    await stage.calls(tell)


@story("acquire.instance_started")
async def an_acquire_of_what_was_stopped(stage: Stage) -> None:
    async def tell(calls: Sandboxes) -> None:
        await stage.acquire(calls)
        await stage.release(calls, "IDLE_EXPIRED")
        await stage.acquire(calls, 2)

    await stage.calls(tell)


@story("acquire.network_set")
async def another_network_policy(stage: Stage) -> None:
    async def tell(calls: Sandboxes) -> None:
        await stage.acquire(calls, network=OPEN)
        await stage.release(calls, "CLEAN_TURN")
        await stage.acquire(calls, 2, network=BLOCKED)

    await stage.calls(tell)


@story("acquire.replaced")
async def another_spec(stage: Stage) -> None:
    async def tell(calls: Sandboxes) -> None:
        await stage.acquire(calls)
        await stage.release(calls, "CLEAN_TURN")
        await stage.acquire(calls, 2, env={"OTHER": "1"})

    await stage.calls(tell)


@story("acquire.undoing")
async def a_release_during_a_create(stage: Stage) -> None:
    async def tell(calls: Sandboxes) -> None:
        stage.scene.faults.set("hold-created")
        acquiring = asyncio.create_task(stage.acquire(calls))
        await stage.scene.faults.entered("created")
        releasing = asyncio.create_task(stage.release(calls, "KILLED"))
        await stage.scene.closed(SESSION, 1)
        stage.scene.faults.clear("hold-created")
        await asyncio.gather(acquiring, releasing)

    await stage.calls(tell)


@story("stop.written", "stop.done")
async def a_stop(stage: Stage) -> None:
    async def tell(calls: Sandboxes) -> None:
        await stage.acquire(calls)
        await stage.release(calls, "IDLE_EXPIRED")

    await stage.calls(tell)


@story("delete.written", "delete.done")
async def a_delete(stage: Stage) -> None:
    async def tell(calls: Sandboxes) -> None:
        await stage.acquire(calls)
        await stage.release(calls, "KILLED")

    await stage.calls(tell)


@story("delete.failed")
async def a_delete_that_fails(stage: Stage) -> None:
    async def tell(calls: Sandboxes) -> None:
        await stage.acquire(calls)
        stage.scene.faults.set("fail-delete")
        await stage.release(calls, "KILLED")

    await stage.calls(tell)
    stage.scene.faults.clear("fail-delete")


@story("settle.written", "settle.looked", "reconcile.settled")
async def a_dead_worker(stage: Stage) -> None:
    """Nobody asks for it again, so the reconciler takes over."""
    wanted, stage.point = stage.point, "sandbox.acquire.daemon_started"
    await stage.calls(stage.acquire)
    stage.point = wanted
    await stage.by_itself()


@story("release.claims_closed", "release.parked", "release.answering", "park.slot_taken")
async def a_clean_turn(stage: Stage) -> None:
    async def tell(calls: Sandboxes) -> None:
        await stage.acquire(calls)
        await stage.release(calls, "CLEAN_TURN")

    await stage.calls(tell)


@story("park.evicted")
async def an_eviction(stage: Stage) -> None:
    async def tell(calls: Sandboxes) -> None:
        await asyncio.gather(stage.acquire(calls), stage.acquire(calls, session="other"))
        await stage.release(calls, "CLEAN_TURN")
        await stage.release(calls, "CLEAN_TURN", session="other")

    await stage.calls(tell, HEARTH_LOCAL_WARM_CAP="1")


@story("park.lost")
async def an_acquire_that_comes_between_a_slot_and_its_park(stage: Stage) -> None:
    """The slot is taken and then not needed: whoever comes next must not find it taken for ever."""
    doomed = await stage.scene.started(**armed(f"sandbox.park.slot_taken=stop,{stage.point}"))
    other = await stage.scene.started()
    async with connected(doomed.address) as calls, connected(other.address) as others:
        await stage.acquire(calls)
        releasing = asyncio.create_task(stage.release(calls, "CLEAN_TURN"))
        await doomed.logs("crash point reached: sandbox.park.slot_taken", timeout=60)
        await stage.acquire(others, 2)
        doomed.thaw()
        await died(doomed, stage.point)
        await releasing
    other.kill9()


@story("lapse.ended")
async def a_lapse(stage: Stage) -> None:
    await stage.calls(stage.acquire)


@story("workspace.claims_closed", "workspace.sandbox_deleted", "workspace.deleted")
async def a_deleted_session(stage: Stage) -> None:
    async def tell(calls: Sandboxes) -> None:
        await stage.acquire(calls)
        await tried(calls.delete_workspace(SESSION, 2))

    await stage.calls(tell)


@story("reconcile.rows_read", "reconcile.listed")
async def a_pass(stage: Stage) -> None:
    async def tell(calls: Sandboxes) -> None:
        await asyncio.gather(*(stage.acquire(calls, session=session) for session in (SESSION, "other")))
        await stage.release(calls, "CLEAN_TURN")

    await stage.before(tell)
    await stage.by_itself()


@story("reconcile.seen_gone")
async def an_instance_that_went_by_itself(stage: Stage) -> None:
    async def tell(calls: Sandboxes) -> None:
        await stage.acquire(calls)

    await stage.before(tell, HEARTH_LEASE="60")
    for process in members(stage.sandbox_id):
        process.kill()
        process.wait(10)
    shutil.rmtree(stage.scene.root / f"hearth-{stage.sandbox_id}")
    await stage.by_itself(HEARTH_LEASE="60")


@story("reconcile.orphan_written")
async def an_unknown_instance(stage: Stage) -> None:
    async def tell(calls: Sandboxes) -> None:
        await stage.acquire(calls)

    await stage.before(tell)
    await stage.scene.stranger(await stage.scene.deployment())
    await stage.by_itself()


@story("reconcile.breaker_tripped")
async def too_many_unknown_instances(stage: Stage) -> None:
    await stage.before(stage.acquire)
    deployment = await stage.scene.deployment()
    names = [await stage.scene.stranger(deployment) for _ in range(6)]
    await stage.by_itself()
    # It waits for a person, also after a restart, and also when there are fewer.
    root = stage.scene.root
    shutil.rmtree(root / names.pop())
    service = await stage.scene.started()
    async with connected(service.address) as calls:
        for _ in range(2):
            report = await calls.reconcile()
            assert (report.unknown, report.refused_unknown) == (5, True)
        assert all((root / name).exists() for name in names)
        report = await calls.reconcile(confirm_unknown=True)
        assert (report.unknown, report.refused_unknown) == (5, False)
        assert not any((root / name).exists() for name in names)
        assert (await calls.reconcile()).unknown == 0
    await service.terminate()


def test_every_point_has_its_story() -> None:
    assert set(STORIES) == set(crashpoints.declared("sandbox"))


@pytest.mark.parametrize("point", sampled(crashpoints.declared("sandbox"), every=12))
async def test_killed_at_a_point_it_settles_and_serves(migrated_dsn: str, scratch: Path, point: str) -> None:
    async with scene(migrated_dsn, scratch) as found:
        await STORIES[point](Stage(found, point))
        found.witness.check()
        service = await found.started()
        async with connected(service.address) as calls:
            await found.check_settled(calls, SESSION)


@pytest.mark.parametrize(
    "point",
    sampled(
        [
            "acquire.intent_written",
            "acquire.created",
            "acquire.starting_written",
            "acquire.daemon_started",
            "acquire.up_written",
            "acquire.restart_written",
        ],
        every=3,
    ),
)
async def test_asked_again_at_once_the_same_claim_gets_one_sandbox_without_waiting_for_a_deadline(
    migrated_dsn: str, scratch: Path, point: str
) -> None:
    """With deadlines of an hour: that its worker is dead is seen by the lock that it does not hold any more."""
    patient = {
        "HEARTH_CREATE_DEADLINE": "3600",
        "HEARTH_START_DEADLINE": "3600",
        "HEARTH_LEASE": "60",
        "HEARTH_LEASE_GAP": "30",
        # The caller comes first, not the reconciler.
        "HEARTH_RECONCILE_INTERVAL": "3600",
    }
    restart = point == "acquire.restart_written"
    epoch = 2 if restart else 1
    async with scene(migrated_dsn, scratch) as found:
        service = await found.started(**patient, **armed(f"sandbox.{point}"))
        async with connected(service.address) as calls:
            if restart:
                await calls.acquire(SESSION, 1, holder=new_id())
                await calls.release(SESSION, 1)
            assert await tried(calls.acquire(SESSION, epoch, holder=found.me)) is None
        await died(service, f"sandbox.{point}")
        service = await found.started(**patient)
        async with connected(service.address) as calls:
            answer = await calls.acquire(SESSION, epoch, holder=found.me)
            assert [row.sandbox_id for row in await calls.list()] == [answer.sandbox_id]
            assert [one.sandbox_id for one in found.witness.alive()] == [answer.sandbox_id]
            assert len(members(answer.sandbox_id)) == 1
            assert [path.name for path in found.root.glob("hearth-*")] == [f"hearth-{answer.sandbox_id}"]
            await calls.clear()
        found.witness.check()
