"""Health that tells the truth: the standard gRPC health service, driven by asking each dependency every second."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeAlias

import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hearth.version import VERSION_KEY, version
from services.chassis.errors import invalid

logger = logging.getLogger(__name__)

Check = Callable[[], Awaitable[object]]

CHECK_EVERY_SECONDS = 1.0
CHECK_TIMEOUT_SECONDS = 2.0
# Anybody may watch, without a token.
MOST_WATCHERS = 10_000
LONGEST_NAME_BYTES = 128

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN

# Quoted: the class is generic for the type checker only.
_Context: TypeAlias = "grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse]"


class Servicer(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """The standard service, which also tells the version of the process.

    That of the library is not used: it writes to a watcher while it holds a lock that changes of the health wait for,
    so that one watcher who takes nothing would freeze the health of the process.
    """

    def __init__(self) -> None:
        self._version = ((VERSION_KEY, version()),)
        self._statuses: dict[str, health_pb2.HealthCheckResponse.ServingStatus] = {}
        self._changed = asyncio.Event()
        self._final = False
        self._watchers = 0

    def publish(self, statuses: Mapping[str, health_pb2.HealthCheckResponse.ServingStatus]) -> None:
        """Tell these from now on; after `end` nothing changes any more."""
        if self._final or statuses.items() <= self._statuses.items():
            return
        self._statuses |= statuses
        self._changed.set()
        self._changed = asyncio.Event()

    def end(self) -> None:
        """NOT_SERVING for good, whatever the name."""
        self.publish(dict.fromkeys(self._statuses, _NOT_SERVING))
        self._final = True

    async def Check(self, request: health_pb2.HealthCheckRequest, context: _Context) -> health_pb2.HealthCheckResponse:
        context.set_trailing_metadata(self._version)
        status = self._statuses.get(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND)
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: _Context) -> None:
        name = request.service
        if len(name.encode()) > LONGEST_NAME_BYTES:
            raise invalid("service", f"may have {LONGEST_NAME_BYTES} bytes")
        if self._watchers >= MOST_WATCHERS:
            # The one code after which gRPC's clients go on without a health; after any other they make no calls.
            await context.abort(grpc.StatusCode.UNIMPLEMENTED, "too many watch already; use Check")
        self._watchers += 1
        told = None
        try:
            while True:
                changed, status = self._changed, self._statuses.get(name, _UNKNOWN)
                if status != told:
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                    told = status
                await changed.wait()
        finally:
            self._watchers -= 1


class Health:
    """The health of one process.

    The names "" and those of its gRPC services are SERVING while every dependency that is needed answers, and
    NOT_SERVING from the start of a shutdown on. Each dependency has its own name beside them, for a person who asks
    which one it is.
    """

    def __init__(self) -> None:
        self.servicer = Servicer()
        self._checks: dict[str, Check] = {}
        self._needed: set[str] = set()
        self._limiting: set[str] = set()
        self._down: dict[str, str] = {}
        self._services: list[str] = [""]

    def add(self, dependency: str, check: Check, *, needed: bool = True) -> None:
        """Depend on `dependency`: `check` returns when it answers and raises when it does not.

        One that is not `needed` only limits what the process can do while it is away: callers are sent elsewhere for it
        until it has answered once, and not again after that.
        """
        self._checks[dependency] = check
        self._needed.add(dependency)
        if not needed:
            self._limiting.add(dependency)

    @property
    def answering(self) -> dict[str, bool]:
        """Which dependencies answered when they were asked last."""
        return {name: name not in self._down for name in self._checks}

    async def begin(self, services: Iterable[str]) -> None:
        """Publish the first verdict for `services`, before the port is served."""
        self._services += services
        await self.check_once()

    async def watch(self) -> None:
        """Ask for ever."""
        while True:
            await asyncio.sleep(CHECK_EVERY_SECONDS)
            await self.check_once()

    async def check_once(self) -> None:
        """Ask every dependency once, all at the same time, and publish the result."""
        names = list(self._checks)
        found = await asyncio.gather(*(self._ask(self._checks[name]) for name in names))
        for name, trouble in zip(names, found, strict=True):
            self._note(name, trouble)
        self._needed -= self._limiting - self._down.keys()
        serves = dict.fromkeys(self._services, self._needed.isdisjoint(self._down))
        self.servicer.publish(
            {name: _SERVING if well else _NOT_SERVING for name, well in {**self.answering, **serves}.items()}
        )

    def drain(self) -> None:
        """NOT_SERVING for good: the process ends. Waits for nobody who is told."""
        self.servicer.end()

    def _note(self, name: str, trouble: str | None) -> None:
        if trouble and name not in self._down:
            logger.warning("dependency does not answer", extra={"dependency": name, "cause": trouble})
        if trouble:
            self._down[name] = trouble
        elif self._down.pop(name, None):
            logger.info("dependency answers again", extra={"dependency": name})

    async def _ask(self, check: Check) -> str | None:
        try:
            async with asyncio.timeout(CHECK_TIMEOUT_SECONDS):
                await check()
        except TimeoutError:
            return "no answer in time"
        except Exception as error:  # noqa: BLE001 - any failure of a check means that the dependency is not there
            return f"{type(error).__name__}: {error}"
        return None
