"""Acquire: a running sandbox with a live daemon, for one claim.

A loop of single steps. Each reads the session, lets `compatibility.next_step` decide, and does that one step under a
compare-and-set; whoever loses a race goes round again. The loop runs in a task of its own, so a caller that goes away
leaves either a sandbox that its claim covers or nothing. While a caller waits, its claim is renewed for it: it has no
sandbox yet that it could renew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from hearth.secret import Secret
from services.chassis import crashpoints
from services.chassis.clock import Clock
from services.chassis.errors import Unavailable, as_hearth_error
from services.sandbox import problems
from services.sandbox.claims import Verdict, judge
from services.sandbox.compatibility import (
    AgentCommand,
    Step,
    Wanted,
    daemon_fingerprint,
    fingerprint,
    network_policy,
    next_step,
)
from services.sandbox.daemons import Daemons, Pulse
from services.sandbox.metrics import Metrics
from services.sandbox.providers.port import Provider, ProviderError
from services.sandbox.rows import Row
from services.sandbox.stages import Stage, Stages
from services.sandbox.starting import Job, Starter, Want, held_for
from services.sandbox.states import How
from services.sandbox.store import Renewal, Store
from services.sandbox.transitions import Transitions
from services.sandbox.works import Works

logger = logging.getLogger(__name__)

# For an address of a daemon that does not answer: a turn waits for it.
_LOOK_UP_SECONDS = 5.0

crashpoint = crashpoints.declare(
    "sandbox", "acquire.admitted", "acquire.attached_written", "acquire.replaced", "acquire.answering"
)


@dataclass(frozen=True, slots=True)
class Acquired:
    """Its result; `workspace` is a directory in the sandbox."""

    sandbox_id: str
    how: How
    url: str
    token: Secret
    headers: Mapping[str, str] = field(repr=False)
    workspace: str
    stages: tuple[Stage, ...]


class Acquirer:
    """Serves Acquire. Two calls under one claim of one holder are one work."""

    def __init__(
        self,
        *,
        store: Store,
        providers: Mapping[str, Provider],
        transitions: Transitions,
        starter: Starter,
        daemons: Daemons,
        works: Works,
        agents: Mapping[str, AgentCommand],
        clock: Clock,
        metrics: Metrics,
        renew_every: float,
    ) -> None:
        """`renew_every`: seconds between renewals of a claim whose caller waits; well below a lease."""
        self._store = store
        self._providers = providers
        self._transitions = transitions
        self._starter = starter
        self._daemons = daemons
        self._works = works
        self._agents = agents
        self._clock = clock
        self._metrics = metrics
        self._renew_every = renew_every

    async def acquire(self, want: Want) -> Acquired:
        """See the RPC. Raises FENCED, PROVIDER_UNAVAILABLE, PROVIDER_REFUSED, DAEMON_UNREACHABLE, SANDBOX_BUSY."""
        key = ("acquire", want.key, want.claim, want.holder)
        renewing = asyncio.create_task(self._renew(want))
        try:
            return await self._works.join("acquire", key, lambda: self._counted(want))
        finally:
            renewing.cancel()

    async def _counted(self, want: Want) -> Acquired:
        began = self._clock.monotonic()
        try:
            done = await self._acquire(want)
        except Exception:
            self._metrics.not_acquired()
            raise
        self._metrics.acquired(done.how, self._clock.monotonic() - began, done.stages)
        return done

    async def _renew(self, want: Want) -> None:
        """An open call is the sign of life of its holder."""
        while True:
            await self._clock.sleep(self._renew_every)
            try:
                # The provider is told of it when there is an instance to speak of.
                renewal = Renewal(want.key, want.claim, active=False)
                await self._store.renew(want.holder, [renewal], refresh_after=self._renew_every)
            except Exception as error:
                if not isinstance(as_hearth_error(error), Unavailable):
                    raise
                logger.warning("claim of a waiting call not renewed", extra={"cause": type(error).__name__})

    async def _acquire(self, want: Want) -> Acquired:
        provider = self._providers[want.spec.provider]
        policy = network_policy(want.spec)
        wanted = Wanted(
            want.claim,
            want.holder,
            fingerprint(want.spec, provider.baked(want.spec)),
            daemon_fingerprint(want.spec, self._agents),
            policy,
            # What the provider's own policy is, only its creation knows.
            converges=provider.sets_network and bool(policy),
        )
        job = Job(want, wanted, Stages(self._clock))
        limits = self._transitions.deadlines
        remembered = self._transitions.remembered(want.key)
        if remembered is not None and next_step(remembered, wanted) is Step.ATTACH:
            # What was parked here last is most likely still so: then one statement does it all.
            done = await self._attach(remembered, job, self._transitions.attach)
            if done is not None:
                return self._answering(done, job)
        until = self._clock.monotonic() + 2 * limits.create + limits.start + limits.stop + limits.delete
        while self._clock.monotonic() < until:
            view = await self._store.admit(want.key, want.claim, want.holder)
            verdict = judge(view.standing, want.claim, want.holder)
            if verdict in (Verdict.FENCED, Verdict.CLOSED):
                assert view.standing is not None
                raise problems.fenced(view.standing.highest)
            if verdict is Verdict.NEWER and not view.admitted:
                continue
            crashpoint("acquire.admitted")
            done = await self._step(view.row, job)
            if done is not None:
                return self._answering(done, job)
        raise problems.sandbox_busy()

    def _answering(self, done: Acquired, job: Job) -> Acquired:
        crashpoint("acquire.answering")
        logger.info("acquired", extra=job.about(done.sandbox_id, how=done.how))
        return done

    async def _step(self, row: Row | None, job: Job) -> Acquired | None:
        """One step; None: go round again."""
        step = next_step(row, job.wanted)
        if row is None:
            return await self._started(await self._starter.create(job), job)
        if step is Step.WAIT:
            with job.stages.time("wait"):
                await self._transitions.wait(row)
        elif step is Step.SETTLE:
            with job.stages.time("wait"):
                await self._transitions.settle(row)
        elif step is Step.ANSWER:
            return await self._answer(row, row.how or How.ATTACHED, job)
        elif step is Step.ATTACH:
            return await self._attach(row, job, partial(self._transitions.move, while_highest=True))
        elif step in (Step.RESTART, Step.START):
            stage = "restart" if step is Step.RESTART else "daemon"
            return await self._started(await self._starter.restart(row, job, stage=stage), job)
        else:
            with job.stages.time("delete"):
                await self._transitions.delete(row)
            crashpoint("acquire.replaced")
        return None

    async def _attach(self, row: Row, job: Job, move: Callable[[Row, Row], Awaitable[Row | None]]) -> Acquired | None:
        """Give the running sandbox to the claim; None: it was not as `row` says any more."""
        held = replace(held_for(row, job.want), how=How.ATTACHED, token=row.token, url=row.url, headers=row.headers)
        # Asked meanwhile: the answer says the same whoever has the row by then.
        probing = asyncio.create_task(self._probe(row))
        try:
            attached = await move(row, held)
            if attached is None:
                return None
            crashpoint("acquire.attached_written")
            return await self._answer(attached, How.ATTACHED, job, probing)
        finally:
            probing.cancel()

    async def _started(self, row: Row | None, job: Job) -> Acquired | None:
        """What was started, unless a higher claim came meanwhile: it is about to take the sandbox over."""
        if row is None:
            return None
        standing = (await self._store.view(job.want.key)).standing
        if standing is not None and standing.claim > job.want.claim:
            raise problems.fenced(standing.highest)
        assert row.how is not None
        return self._acquired(row, row.how, job)

    async def _answer(
        self, row: Row, how: How, job: Job, probing: asyncio.Task[Pulse] | None = None
    ) -> Acquired | None:
        """The sandbox as it is, if its daemon answers under the token; else the daemon is started anew."""
        with job.stages.time("probe"):
            pulse = await (probing or self._probe(row))
            if pulse is not Pulse.ALIVE and (moved := await self._looked_up(row)) is not None:
                row = moved
                pulse = await self._probe(row)
        if pulse is Pulse.ALIVE:
            return self._acquired(row, how, job)
        logger.warning("daemon lost", extra=job.about(row.sandbox_id, pulse=pulse.value))
        return await self._started(await self._starter.restart(row, job, stage="restart"), job)

    async def _probe(self, row: Row) -> Pulse:
        assert row.token is not None
        return await self._daemons.probe(row.url, row.token, row.headers)

    async def _looked_up(self, row: Row) -> Row | None:
        """The row with another address, if the provider has one by now: what leads to a daemon may be older than it."""
        try:
            address = await self._transitions.call(
                row.provider, _LOOK_UP_SECONDS, lambda provider: provider.endpoint(row.reference)
            )
        except ProviderError as trouble:
            logger.warning("address not found", extra={"sandbox_id": row.sandbox_id, "error": str(trouble)})
            return None
        if (address.url, dict(address.headers)) == (row.url, dict(row.headers)):
            return None
        return await self._transitions.move(row, replace(row, url=address.url, headers=dict(address.headers)))

    def _acquired(self, row: Row, how: How, job: Job) -> Acquired:
        assert row.token is not None
        workspace = self._providers[row.provider].workspace(job.want.key)
        return Acquired(row.sandbox_id, how, row.url, row.token, row.headers, workspace, job.stages.done)
