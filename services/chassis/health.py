"""Health that tells the truth: the standard gRPC health service, driven by asking each dependency every second."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable

import grpc.aio
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer

from hearth.version import VERSION_KEY, version

logger = logging.getLogger(__name__)

Check = Callable[[], Awaitable[object]]

CHECK_EVERY_SECONDS = 1.0
CHECK_TIMEOUT_SECONDS = 2.0

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class _Servicer(HealthServicer):  # type: ignore[misc]
    """The standard service, which also tells the version of the process."""

    def __init__(self) -> None:
        super().__init__()
        self._version = ((VERSION_KEY, version()),)

    async def Check(
        self,
        request: health_pb2.HealthCheckRequest,
        context: grpc.aio.ServicerContext[health_pb2.HealthCheckRequest, health_pb2.HealthCheckResponse],
    ) -> health_pb2.HealthCheckResponse:
        context.set_trailing_metadata(self._version)
        return await super().Check(request, context)


class Health:
    """The health of one process.

    The names "" and those of its gRPC services are SERVING while every dependency answers, and NOT_SERVING from the
    start of a shutdown on. Each dependency has its own name beside them, for a person who asks which one it is.
    """

    def __init__(self) -> None:
        self.servicer = _Servicer()
        self._checks: dict[str, Check] = {}
        self._down: dict[str, str] = {}
        self._services: list[str] = [""]

    def add(self, dependency: str, check: Check) -> None:
        """Depend on `dependency`: `check` returns when it answers and raises when it does not."""
        self._checks[dependency] = check

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
            await self.servicer.set(name, _NOT_SERVING if trouble else _SERVING)
        for service in self._services:
            await self.servicer.set(service, _NOT_SERVING if self._down else _SERVING)

    async def drain(self) -> None:
        """NOT_SERVING for good: the process ends."""
        await self.servicer.enter_graceful_shutdown()

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
