"""Acquire: a running sandbox with a live daemon, for one claim.

A loop of single steps. Each reads the session, lets `compatibility.next_step` decide, and does that one step under a
compare-and-set; whoever loses a race goes round again. The loop runs in a task of its own, so a caller that goes away
leaves either a sandbox that its claim covers or nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from services.chassis.clock import Clock, Ids
from services.sandbox import problems
from services.sandbox.claims import Claim, Verdict, judge
from services.sandbox.compatibility import (
    AgentCommand,
    Spec,
    Step,
    Wanted,
    daemon_fingerprint,
    fingerprint,
    next_step,
)
from services.sandbox.daemons import Daemons, Pulse, new_token
from services.sandbox.providers.port import (
    CreateRequest,
    DaemonRequest,
    NameTaken,
    Provider,
    ProviderError,
    ProviderRefused,
)
from services.sandbox.rows import Key, Row
from services.sandbox.stages import Stage, Stages
from services.sandbox.states import Desired, How, Observed, Tenure
from services.sandbox.store import Store
from services.sandbox.transitions import Transitions
from services.sandbox.works import Works

logger = logging.getLogger(__name__)

# Of the deadline for a start: what the daemon has to come up, and then to answer.
_SHARE_OF_PROBE = 0.15


@dataclass(frozen=True, slots=True)
class Want:
    """One Acquire."""

    key: Key
    claim: Claim
    holder: str
    spec: Spec


@dataclass(frozen=True, slots=True)
class Acquired:
    """Its result; `workspace` is a directory in the sandbox."""

    sandbox_id: str
    how: How
    url: str
    token: str = field(repr=False)
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
        daemons: Daemons,
        works: Works,
        agents: Mapping[str, AgentCommand],
        deployment_id: str,
        clock: Clock,
        ids: Ids,
    ) -> None:
        self._store = store
        self._providers = providers
        self._transitions = transitions
        self._daemons = daemons
        self._works = works
        self._agents = agents
        self._deployment_id = deployment_id
        self._clock = clock
        self._ids = ids

    async def acquire(self, want: Want) -> Acquired:
        """See the RPC. Raises FENCED, PROVIDER_UNAVAILABLE, PROVIDER_REFUSED, DAEMON_UNREACHABLE, SANDBOX_BUSY."""
        key = ("acquire", want.key, want.claim, want.holder)
        return await self._works.join("acquire", key, lambda: self._acquire(want))

    async def _acquire(self, want: Want) -> Acquired:
        stages = Stages(self._clock)
        wanted = Wanted(want.claim, want.holder, fingerprint(want.spec), daemon_fingerprint(want.spec, self._agents))
        limits = self._transitions.deadlines
        until = self._clock.monotonic() + 2 * limits.create + limits.start + limits.stop + limits.delete
        while self._clock.monotonic() < until:
            view = await self._store.admit(want.key, want.claim, want.holder)
            verdict = judge(view.standing, want.claim, want.holder)
            if verdict in (Verdict.FENCED, Verdict.CLOSED):
                assert view.standing is not None
                raise problems.fenced(view.standing.highest)
            if verdict is Verdict.NEWER and not view.admitted:
                continue
            done = await self._step(view.row, want, wanted, stages)
            if done is not None:
                logger.info("acquired", extra=_about(want, done.sandbox_id, how=done.how))
                return done
        raise problems.sandbox_busy()

    async def _step(self, row: Row | None, want: Want, wanted: Wanted, stages: Stages) -> Acquired | None:
        """One step; None: go round again."""
        step = next_step(row, wanted)
        if row is None:
            return await self._create(want, wanted, stages)
        if step is Step.WAIT:
            with stages.time("wait"):
                await self._transitions.wait(row)
        elif step is Step.SETTLE:
            with stages.time("wait"):
                await self._transitions.settle(row)
        elif step is Step.ANSWER:
            return await self._answer(row, row.how or How.ATTACHED, want, wanted, stages)
        elif step is Step.ATTACH:
            held = replace(_held(row, want), how=How.ATTACHED, token=row.token, url=row.url, headers=row.headers)
            attached = await self._transitions.move(row, held, while_open=True)
            if attached is not None:
                return await self._answer(attached, How.ATTACHED, want, wanted, stages)
        elif step is Step.RESTART:
            return await self._restart(row, want, wanted, stages)
        elif step is Step.START:
            return await self._restart(row, want, wanted, stages, stage="daemon")
        else:
            with stages.time("delete"):
                await self._transitions.delete(row)
        return None

    async def _answer(self, row: Row, how: How, want: Want, wanted: Wanted, stages: Stages) -> Acquired | None:
        """The sandbox as it is, if its daemon answers under the token; else the daemon is started anew."""
        assert row.token is not None
        with stages.time("probe"):
            pulse = await self._daemons.probe(row.url, row.token, row.headers)
        if pulse is Pulse.ALIVE:
            return self._acquired(row, how, want, stages)
        logger.warning("daemon lost", extra=_about(want, row.sandbox_id, pulse=pulse.value))
        return await self._restart(row, want, wanted, stages)

    async def _create(self, want: Want, wanted: Wanted, stages: Stages) -> Acquired | None:
        deadline = self._transitions.deadlines.create
        intent = Row(
            sandbox_id=self._ids.new(),
            key=want.key,
            provider=want.spec.provider,
            agent=want.spec.agent,
            fingerprint=wanted.fingerprint,
            daemon_fingerprint=wanted.daemon_fingerprint,
            desired=Desired.RUNNING,
            observed=Observed.CREATING,
            tenure=Tenure.ACTIVE,
            holder=want.holder,
            claim=want.claim,
        )
        row = await self._store.insert(intent, deadline=deadline)
        if row is None:
            return None
        request = CreateRequest(row.name, self._labels(want.key), want.key, want.spec)
        try:
            with stages.time("create"):
                try:
                    instance = await self._transitions.call(
                        row.provider, deadline, lambda provider: provider.create(request)
                    )
                except NameTaken:
                    # The name is ours alone: an earlier try of this create was not in vain.
                    await self._transitions.call(row.provider, deadline, lambda provider: provider.start(row.name))
                    instance = await self._transitions.call(
                        row.provider, deadline, lambda provider: provider.get(row.name)
                    )
        except ProviderError as trouble:
            logger.warning("create failed", extra=_about(want, row.sandbox_id, error=str(trouble)))
            with stages.time("delete"):
                await self._transitions.delete(replace(row, last_error=str(trouble)))
            if isinstance(trouble, ProviderRefused):
                raise problems.provider_refused(trouble, "spec") from None
            raise problems.provider_unavailable(trouble) from None
        working = await self._transitions.begin(
            row, Observed.STARTING, self._transitions.deadlines.start, provider_id=instance.provider_id
        )
        if working is None:
            await self._undo(replace(row, provider_id=instance.provider_id), How.CREATED)
            return None
        return await self._bring_up(working, How.CREATED, "daemon", want, stages)

    async def _restart(
        self, row: Row, want: Want, wanted: Wanted, stages: Stages, *, stage: str = "restart"
    ) -> Acquired | None:
        """The same instance with a new daemon; started first, since it may have stopped without our knowing."""
        working = await self._begin_start(row, want, wanted)
        if working is None:
            return None
        seconds = self._transitions.deadlines.start
        try:
            with stages.time("start"):
                await self._transitions.call(row.provider, seconds, lambda provider: provider.start(row.reference))
        except ProviderError as trouble:
            await self._give_up(working, trouble, want, stages)
            return None
        again = await self._transitions.begin(working, Observed.STARTING, seconds)
        if again is None:
            return None
        return await self._bring_up(again, How.RESTARTED, stage, want, stages)

    async def _begin_start(self, row: Row, want: Want, wanted: Wanted) -> Row | None:
        # The token goes first: if we die halfway, nobody can take an unknown daemon for a live one.
        held = replace(_held(row, want), daemon_fingerprint=wanted.daemon_fingerprint, observed=Observed.STARTING)
        return await self._transitions.move(
            row,
            replace(held, worker=self._store.worker),
            deadline=self._transitions.deadlines.start,
            while_open=True,
        )

    async def _bring_up(self, working: Row, how: How, stage: str, want: Want, stages: Stages) -> Acquired | None:
        """Start the daemon in a running instance of which this process is the worker, and hand it over."""
        token = new_token()
        seconds = self._transitions.deadlines.start
        request = DaemonRequest(
            token,
            want.key,
            self._agents,
            want.spec.env,
            {secret.name: secret.value for secret in want.spec.secrets},
        )
        try:
            with stages.time(stage):
                address = await self._transitions.call(
                    working.provider, seconds, lambda provider: provider.restart_daemon(working.reference, request)
                )
            with stages.time("probe"):
                await self._daemons.until_alive(address, token, seconds * _SHARE_OF_PROBE)
        except ProviderError as trouble:
            await self._give_up(working, trouble, want, stages)
            if how is How.CREATED:
                raise problems.daemon_unreachable(trouble) from None
            return None
        up = replace(
            working,
            observed=Observed.RUNNING,
            worker=None,
            how=how,
            token=token,
            url=address.url,
            headers=dict(address.headers),
            last_error="",
        )
        done = await self._transitions.move(working, up, while_open=True)
        if done is None:
            with stages.time("delete"):
                await self._undo(working, how)
            return None
        return self._acquired(done, how, want, stages)

    async def _give_up(self, working: Row, trouble: ProviderError, want: Want, stages: Stages) -> None:
        """Delete what would not start: an instance that is half up is worth less than a new one."""
        logger.warning("start failed, deleting", extra=_about(want, working.sandbox_id, error=str(trouble)))
        with stages.time("delete"):
            await self._transitions.delete(replace(working, last_error=str(trouble)))

    async def _undo(self, working: Row, how: How) -> None:
        """The work is done and is not wanted: the claim was closed meanwhile, or somebody took the row over.

        In the latter case the row is theirs. A new instance is deleted all the same, unless it is the very one that
        they found.
        """
        now = await self._store.get(working.sandbox_id)
        if now is not None and now.version == working.version:
            logger.info("claim closed while working, undoing", extra={"sandbox_id": working.sandbox_id, "how": how})
            if how is How.CREATED:
                await self._transitions.delete(now)
            else:
                await self._transitions.stop(now)
        elif how is How.CREATED and (now is None or now.observed is Observed.GONE):
            logger.warning("created too late, deleting", extra={"sandbox_id": working.sandbox_id})
            try:
                await self._transitions.call(
                    working.provider,
                    self._transitions.deadlines.delete,
                    lambda provider: provider.delete(working.reference),
                )
            except ProviderError as trouble:
                # No row knows it any more; the reconciler finds it by its label.
                logger.error("late instance not deleted", extra={"name": working.name, "error": str(trouble)})

    def _acquired(self, row: Row, how: How, want: Want, stages: Stages) -> Acquired:
        assert row.token is not None
        workspace = self._providers[row.provider].workspace(want.key)
        return Acquired(row.sandbox_id, how, row.url, row.token, row.headers, workspace, stages.done)

    def _labels(self, key: Key) -> dict[str, str]:
        return {
            "hearth-deployment": self._deployment_id,
            "hearth-project": key.project,
            "hearth-session": key.session,
        }


def _held(row: Row, want: Want) -> Row:
    """The row under the claim of `want`, with nothing known of its daemon."""
    return replace(
        row,
        desired=Desired.RUNNING,
        tenure=Tenure.ACTIVE,
        holder=want.holder,
        claim=want.claim,
        how=None,
        token=None,
        url="",
        headers={},
    )


def _about(want: Want, sandbox_id: str, **more: object) -> dict[str, object]:
    return {
        "project": want.key.project,
        "session": want.key.session,
        "epoch": want.claim.epoch,
        "attempt": want.claim.attempt,
        "sandbox_id": sandbox_id,
        **more,
    }
