"""The sandbox service as seen from the pool: acquire, release, and the claims that this replica keeps alive."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Coroutine
from typing import Any, TypeAlias

import grpc.aio

from hearth.sandbox.v1 import sandbox_pb2, sandbox_service_pb2, sandbox_service_pb2_grpc
from hearth.secret import Secret
from hearth.types.v1 import content_pb2
from services.chassis.clock import Clock
from services.chassis.errors import Aborted, DeadlineExceeded, HearthError, NotFound, Unavailable, from_rpc_error
from services.pool.harness.port import DaemonEndpoint
from services.pool.rows import Claim, Key

logger = logging.getLogger(__name__)

Reason: TypeAlias = "sandbox_pb2.ReleaseReason.ValueType"
Disposition: TypeAlias = "sandbox_pb2.Disposition.ValueType"
Tenure: TypeAlias = "sandbox_pb2.Tenure.ValueType"

RENEW_EVERY = 15.0
_RENEW_SECONDS = 10.0
_RENEWALS = 1_000
# A create may take the provider two minutes, and may have to delete something first.
_ACQUIRE_SECONDS = 180.0
_RELEASE_SECONDS = 60.0
_ENDPOINT_SECONDS = 5.0
# How long calls are repeated while the service itself is away.
ACQUIRE_PATIENCE = 60.0
RELEASE_PATIENCE = 20.0
_OWED_PATIENCE = 600.0
_FIRST_WAIT = 0.2
_LONGEST_WAIT = 5.0

# What a provider answered after retries of its own: asking again at once would only repeat them.
_FINAL = frozenset({"PROVIDER_UNAVAILABLE", "DAEMON_UNREACHABLE"})


@dataclasses.dataclass(frozen=True, slots=True)
class Acquired:
    """A running sandbox with a live daemon. `how` is `attached`, `restarted` or `created`."""

    sandbox_id: str
    how: str
    endpoint: DaemonEndpoint
    workspace: str
    stages: tuple[content_pb2.StageTiming, ...] = ()


@dataclasses.dataclass(slots=True)
class _Held:
    claim: Claim
    tenure: Tenure
    lost: Callable[[bool], None]


class Sandboxes:
    """Calls of one holder. Errors are `HearthError`s; FENCED means that a higher claim exists."""

    def __init__(
        self,
        channel: grpc.aio.Channel,
        holder: str,
        clock: Clock,
        *,
        spawn: Callable[[str, Coroutine[Any, Any, None]], asyncio.Task[Any]],
    ) -> None:
        self._stub = sandbox_service_pb2_grpc.SandboxServiceStub(channel)
        self._holder = holder
        self._clock = clock
        self._spawn = spawn
        self._held: dict[Key, _Held] = {}

    async def acquire(self, key: Key, claim: Claim, spec: sandbox_pb2.SandboxSpec) -> Acquired:
        """Get the sandbox of a session. The same claim may be asked for again; a cancelled call is covered by it."""
        request = sandbox_service_pb2.AcquireRequest(
            session=key.message(), claim=claim.message(), holder=self._holder, spec=spec
        )
        answer = await self._repeated(
            lambda: self._stub.Acquire(request, timeout=_ACQUIRE_SECONDS), key, "acquire", ACQUIRE_PATIENCE
        )
        return Acquired(
            answer.sandbox_id,
            sandbox_pb2.AcquireHow.Name(answer.how).removeprefix("ACQUIRE_HOW_").lower(),
            _endpoint(answer.endpoint),
            answer.workspace,
            tuple(answer.timings.stages),
        )

    async def release(
        self, key: Key, claim: Claim, reason: Reason, *, patience: float = RELEASE_PATIENCE, gone: bool = False
    ) -> Disposition:
        """Give the sandbox back; what was done to it. One that was parked is renewed further, as parked.

        `gone`: for a holder that is no more. Raises when the service stays away for `patience` seconds: then the claim,
        which nobody renews, runs out.
        """
        held = self._held.get(key)
        self.let_go(key, claim)
        request = sandbox_service_pb2.ReleaseRequest(
            session=key.message(), claim=claim.message(), reason=reason, holder="" if gone else self._holder
        )
        answer = await self._repeated(
            lambda: self._stub.Release(request, timeout=_RELEASE_SECONDS), key, "release", patience
        )
        logger.info(
            "sandbox released",
            extra={
                "session": str(key),
                "claim": str(claim),
                "reason": sandbox_pb2.ReleaseReason.Name(reason),
                "disposition": sandbox_pb2.Disposition.Name(answer.disposition),
                "sandbox": answer.sandbox_id,
            },
        )
        if answer.disposition == sandbox_pb2.DISPOSITION_PARKED and held is not None and key not in self._held:
            self.hold(key, claim, sandbox_pb2.TENURE_PARKED, held.lost)
        disposition: Disposition = answer.disposition
        return disposition

    def release_later(self, key: Key, claim: Claim, reason: Reason, *, gone: bool = False) -> None:
        """Give the sandbox back in the background, repeated for a long time."""

        async def release() -> None:
            try:
                await self.release(key, claim, reason, patience=_OWED_PATIENCE, gone=gone)
            except HearthError as error:
                logger.error("release given up", extra={"session": str(key), "reason": error.reason})

        self._spawn(f"release {key}", release())

    async def endpoint(self, key: Key, claim: Claim) -> DaemonEndpoint | None:
        """Where the daemon of a sandbox that is held answers, asked of the provider anew; None when it is gone.

        One try: who asks has doubts, and asks again. Raises FENCED, and `Unavailable` when nobody can tell.
        """
        request = sandbox_service_pb2.GetEndpointRequest(session=key.message(), claim=claim.message())
        try:
            answer = await self._stub.GetEndpoint(request, timeout=_ENDPOINT_SECONDS)
        except grpc.aio.AioRpcError as error:
            refused = from_rpc_error(error)
            if isinstance(refused, NotFound):
                return None
            raise refused from None
        return _endpoint(answer.endpoint)

    async def delete_workspace(self, key: Key, claim: Claim) -> None:
        """Delete sandbox and workspace of a session for good."""
        request = sandbox_service_pb2.DeleteWorkspaceRequest(session=key.message(), claim=claim.message())
        await self._repeated(
            lambda: self._stub.DeleteWorkspace(request, timeout=_RELEASE_SECONDS), key, "delete", RELEASE_PATIENCE
        )

    def hold(self, key: Key, claim: Claim, tenure: Tenure, lost: Callable[[bool], None]) -> None:
        """Renew a claim from now on. `lost(fenced)` is called, once, when it does not stand any more."""
        self._held[key] = _Held(claim, tenure, lost)

    def let_go(self, key: Key, claim: Claim) -> None:
        """Renew a claim, and those below it, no more."""
        held = self._held.get(key)
        if held is not None and held.claim <= claim:
            del self._held[key]

    async def renew(self) -> None:
        """Renew what is held once, and tell of what is lost."""
        held = list(self._held.items())
        for start in range(0, len(held), _RENEWALS):
            batch = held[start : start + _RENEWALS]
            request = sandbox_service_pb2.RenewClaimsRequest(
                holder=self._holder,
                renewals=[
                    sandbox_pb2.Renewal(session=key.message(), claim=one.claim.message(), tenure=one.tenure)
                    for key, one in batch
                ],
            )
            try:
                answer = await self._stub.RenewClaims(request, timeout=_RENEW_SECONDS)
            except grpc.aio.AioRpcError as error:
                # A lease is six renewals long.
                logger.warning("claims were not renewed", extra={"claims": len(batch), "cause": error.code().name})
                continue
            for (key, one), result in zip(batch, answer.results, strict=True):
                self._renewed(key, one, result.outcome)

    def _renewed(self, key: Key, one: _Held, outcome: sandbox_pb2.RenewalOutcome.ValueType) -> None:
        if outcome == sandbox_pb2.RENEWAL_OUTCOME_OK or self._held.get(key) is not one:
            return
        logger.warning(
            "claim lost",
            extra={
                "session": str(key),
                "claim": str(one.claim),
                "outcome": sandbox_pb2.RenewalOutcome.Name(outcome),
            },
        )
        del self._held[key]
        one.lost(outcome == sandbox_pb2.RENEWAL_OUTCOME_FENCED)

    async def _repeated(self, call: Callable[[], Any], key: Key, what: str, patience: float) -> Any:
        ends = self._clock.monotonic() + patience
        wait = _FIRST_WAIT
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                refused = from_rpc_error(error)
            passing = isinstance(refused, Unavailable | DeadlineExceeded | Aborted) and refused.reason not in _FINAL
            if not passing or self._clock.monotonic() + wait > ends:
                raise refused
            logger.warning(
                "sandbox service is asked again",
                extra={"session": str(key), "call": what, "cause": refused.reason},
            )
            await self._clock.sleep(wait)
            wait = min(wait * 2, _LONGEST_WAIT)


def _endpoint(found: sandbox_pb2.Endpoint) -> DaemonEndpoint:
    return DaemonEndpoint(found.url, Secret(found.token), dict(found.headers))
