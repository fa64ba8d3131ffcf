"""Making a sandbox run for a claim: a new one, or the same one with a new daemon.

Each step is written before it is begun and again when it is done, so that whoever comes after a crash knows where to
look. Work that ends under a claim that was closed meanwhile undoes itself.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from services.chassis import crashpoints
from services.chassis.clock import Ids
from services.sandbox import problems
from services.sandbox.claims import Claim
from services.sandbox.compatibility import AgentCommand, Spec, Wanted
from services.sandbox.daemons import Daemons, new_token
from services.sandbox.providers.port import (
    CreateRequest,
    DaemonRequest,
    Instance,
    NameTaken,
    ProviderError,
    ProviderRefused,
)
from services.sandbox.rows import UNKNOWN_NETWORK, Key, Row
from services.sandbox.stages import Stages
from services.sandbox.states import Desired, How, Observed, Tenure
from services.sandbox.store import Store
from services.sandbox.transitions import Transitions

logger = logging.getLogger(__name__)

crashpoint = crashpoints.declare(
    "sandbox",
    "acquire.intent_written",
    "acquire.created",
    "acquire.starting_written",
    "acquire.restart_written",
    "acquire.instance_started",
    "acquire.network_set",
    "acquire.daemon_started",
    "acquire.probed",
    "acquire.up_written",
    "acquire.undoing",
)

# Of the deadline for a start: what the daemon has to come up, and then to answer.
_SHARE_OF_PROBE = 0.15


@dataclass(frozen=True, slots=True)
class Want:
    """One Acquire."""

    key: Key
    claim: Claim
    holder: str
    spec: Spec


@dataclass(slots=True)
class Job:
    """One Acquire at work: what is asked for, what of it is compared, how long it took so far."""

    want: Want
    wanted: Wanted
    stages: Stages = field(repr=False)

    def about(self, sandbox_id: str, **more: object) -> dict[str, object]:
        """For a line in the log."""
        return {
            "project": self.want.key.project,
            "session": self.want.key.session,
            "epoch": self.want.claim.epoch,
            "attempt": self.want.claim.attempt,
            "sandbox_id": sandbox_id,
            **more,
        }


class Starter:
    """Creates and restarts. What returns None lost a race or gave the instance up: read the session again."""

    def __init__(
        self,
        *,
        store: Store,
        transitions: Transitions,
        daemons: Daemons,
        agents: Mapping[str, AgentCommand],
        deployment_id: str,
        ids: Ids,
    ) -> None:
        self._store = store
        self._transitions = transitions
        self._daemons = daemons
        self._agents = agents
        self._deployment_id = deployment_id
        self._ids = ids

    async def create(self, job: Job) -> Row | None:
        """A new sandbox. Raises PROVIDER_REFUSED, PROVIDER_UNAVAILABLE, DAEMON_UNREACHABLE; then nothing is left."""
        want, wanted = job.want, job.wanted
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
            network=wanted.network,
        )
        row = await self._store.insert(intent, deadline=self._transitions.deadlines.create)
        if row is None:
            return None
        crashpoint("acquire.intent_written")
        try:
            with job.stages.time("create"):
                instance = await self._instance(row, want)
        except ProviderError as trouble:
            logger.warning("create failed", extra=job.about(row.sandbox_id, error=str(trouble)))
            with job.stages.time("delete"):
                given_up = await self._transitions.delete(replace(row, last_error=str(trouble)))
            if isinstance(trouble, ProviderRefused):
                raise problems.provider_refused(trouble, "spec") from None
            if given_up is None:
                return None
            raise problems.provider_unavailable(trouble) from None
        crashpoint("acquire.created")
        working = await self._transitions.begin(
            row,
            Observed.STARTING,
            self._transitions.deadlines.start,
            while_open=True,
            provider_id=instance.provider_id,
        )
        if working is None:
            await self._undo(replace(row, provider_id=instance.provider_id), How.CREATED)
            return None
        crashpoint("acquire.starting_written")
        return await self._bring_up(working, How.CREATED, "daemon", job)

    async def restart(self, row: Row, job: Job, *, stage: str) -> Row | None:
        """The same instance with a new daemon; started first, since it may have stopped without our knowing."""
        working = await self._begin(row, job)
        if working is None:
            return None
        crashpoint("acquire.restart_written")
        seconds = self._transitions.deadlines.start
        try:
            with job.stages.time("start"):
                await self._transitions.call(row.provider, seconds, lambda provider: provider.start(row.reference))
            crashpoint("acquire.instance_started")
            if working.network != job.wanted.network:
                # Before anything runs in it again; what cannot be set is not run with.
                with job.stages.time("network"):
                    await self._set_network(working, job.wanted.network)
                crashpoint("acquire.network_set")
        except ProviderError as trouble:
            await self._give_up(working, trouble, How.RESTARTED, job)
            return None
        again = await self._transitions.begin(
            working, Observed.STARTING, seconds, while_open=True, network=job.wanted.network
        )
        if again is None:
            await self._undo(working, How.RESTARTED)
            return None
        return await self._bring_up(again, How.RESTARTED, stage, job)

    async def _instance(self, row: Row, want: Want) -> Instance:
        deadline = self._transitions.deadlines.create
        labels = {
            "hearth-deployment": self._deployment_id,
            "hearth-project": want.key.project,
            "hearth-session": want.key.session,
        }
        request = CreateRequest(row.name, labels, want.key, want.spec)
        try:
            return await self._transitions.call(row.provider, deadline, lambda provider: provider.create(request))
        except NameTaken:
            # The name is ours alone: an earlier try of this create was not in vain.
            await self._transitions.call(row.provider, deadline, lambda provider: provider.start(row.name))
            return await self._transitions.call(row.provider, deadline, lambda provider: provider.get(row.name))

    async def _begin(self, row: Row, job: Job) -> Row | None:
        # Token and policy go first: if we die halfway, nobody takes an unknown daemon for a live one, nor a policy that
        # is half set for either.
        held = replace(
            held_for(row, job.want),
            daemon_fingerprint=job.wanted.daemon_fingerprint,
            observed=Observed.STARTING,
            worker=self._store.worker,
            network=row.network if row.network == job.wanted.network else UNKNOWN_NETWORK,
        )
        return await self._transitions.move(row, held, deadline=self._transitions.deadlines.start, while_highest=True)

    async def _set_network(self, row: Row, policy: str) -> None:
        mode, *allow = policy.split(" ")
        await self._transitions.call(
            row.provider,
            self._transitions.deadlines.start,
            lambda provider: provider.set_network(row.reference, mode, allow),
        )

    async def _bring_up(self, working: Row, how: How, stage: str, job: Job) -> Row | None:
        """Start the daemon in a running instance of which this process is the worker, and hand it over."""
        token = new_token()
        spec, seconds = job.want.spec, self._transitions.deadlines.start
        request = DaemonRequest(
            token=token,
            key=job.want.key,
            agents=self._agents,
            env=spec.env,
            secrets={secret.name: secret.value for secret in spec.secrets},
            agent=spec.agent,
        )
        try:
            with job.stages.time(stage):
                address = await self._transitions.call(
                    working.provider, seconds, lambda provider: provider.restart_daemon(working.reference, request)
                )
            crashpoint("acquire.daemon_started")
            with job.stages.time("probe"):
                await self._daemons.until_alive(address, token, seconds * _SHARE_OF_PROBE)
        except ProviderError as trouble:
            ours = await self._give_up(working, trouble, how, job)
            if ours and how is How.CREATED:
                raise problems.daemon_unreachable(trouble) from None
            return None
        crashpoint("acquire.probed")
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
            with job.stages.time("delete"):
                await self._undo(working, how)
            return None
        crashpoint("acquire.up_written")
        return done

    async def _give_up(self, working: Row, trouble: ProviderError, how: How, job: Job) -> bool:
        """Delete what would not start: an instance that is half up is worth less than a new one. False: somebody took
        the row over meanwhile, so it may be up by now."""
        logger.warning("start failed, deleting", extra=job.about(working.sandbox_id, error=str(trouble)))
        with job.stages.time("delete"):
            if await self._transitions.delete(replace(working, last_error=str(trouble))) is not None:
                return True
            await self._undo(working, how)
            return False

    async def _undo(self, working: Row, how: How) -> None:
        """The work is done, or failed, and is not wanted: the claim was closed meanwhile, or somebody took the row.

        In the latter case the row is theirs. If they have seen the instance gone, what this work made of it after that
        is deleted; else it is the very one that they have.
        """
        crashpoint("acquire.undoing")
        now = await self._store.get(working.sandbox_id)
        if now is not None and now.version == working.version:
            logger.info("claim closed while working, undoing", extra={"sandbox_id": working.sandbox_id, "how": how})
            if how is How.CREATED:
                await self._transitions.delete(replace(now, provider_id=working.provider_id))
            else:
                await self._transitions.stop(now)
        elif now is None or now.observed is Observed.GONE:
            logger.warning("done too late, deleting", extra={"sandbox_id": working.sandbox_id, "how": how})
            try:
                await self._transitions.call(
                    working.provider,
                    self._transitions.deadlines.delete,
                    lambda provider: provider.delete(working.reference),
                )
            except ProviderError as trouble:
                # Its row says gone; the reconciler finds it by its label and writes it down as an orphan.
                logger.error("late instance not deleted", extra={"instance": working.name, "error": str(trouble)})


def held_for(row: Row, want: Want) -> Row:
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
