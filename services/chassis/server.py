"""One process: from its settings to an open port, and from SIGTERM to a clean end.

A service's `__main__` gives `run` its settings class, its name, and `build`: an async context manager that makes its
adapters, adds its servicers to `app.server` and yields. The port is bound before `build` runs (so a taken port is known
at once, and the service knows its address) and served after it; what `build` does after its `yield` happens when no
call is left.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, NoReturn, TypeVar, cast

import grpc
import grpc.aio
import uvloop
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from hearth.channel import MAX_MESSAGE_BYTES
from services.chassis import telemetry
from services.chassis.auth import AuthInterceptor, TokenFile
from services.chassis.clock import Clock, Ids, SystemClock, SystemIds
from services.chassis.grpc_server import new_server, served
from services.chassis.health import Health
from services.chassis.interceptors import ErrorInterceptor, Streams, TelemetryInterceptor, shutting_down
from services.chassis.limits import Limits
from services.chassis.memory import LOOK_SECONDS, Spare, give_back
from services.chassis.metrics import CERTIFICATE_ENDS, DEPENDENCY, TASKS, Readings
from services.chassis.metrics_page import metrics_page
from services.chassis.scopes import SCOPES, Scope
from services.chassis.settings import EXIT_USAGE, Address, ChassisSettings, StartupError, load
from services.chassis.tasks import Tasks
from services.chassis.tls import ServerTls, page_context, server_tls

logger = logging.getLogger(__name__)

EXIT_FAILED = 1
# Kept back from the shutdown time for what comes after the last call: closing pools, sending the last spans.
_CLOSING_SECONDS = 3.0
# How long the status of a stream may be on its way when the process ends.
_STREAM_END_SECONDS = 2.0
# With gRPC's own limit, thousands of readers that reconnect at once are refused as CANCELLED, which nobody retries.
_MAX_PENDING_REQUESTS = 20_000
# How often metrics that have to be looked up are, for a collector that they are sent to.
_READINGS_EVERY_SECONDS = 15.0

_S = TypeVar("_S", bound=ChassisSettings)


class App(Generic[_S]):
    """What `build` gets: the process's settings and its shared parts."""

    def __init__(self, settings: _S, name: str, server: grpc.aio.Server, address: str, streams: Streams) -> None:
        self.settings = settings
        self.name = name
        # host:port that is bound, with the real port when the settings asked for port 0.
        self.address = address
        self.clock: Clock = SystemClock()
        self.ids: Ids = SystemIds()
        self.health = Health()
        self.tasks = Tasks(self._task_died)
        # Metrics that are looked up before somebody is told.
        self.readings = Readings()
        # Set when the process is told to end; long waits race it.
        self.draining = asyncio.Event()
        self._registered = _Registered(server)
        self._streams = streams
        self._stop = asyncio.Event()
        self._hooks: list[_DrainHook] = []
        self._failed = False

    @property
    def server(self) -> grpc.aio.Server:
        """For the generated `add_...Servicer_to_server(servicer, app.server)`; `serve` starts and stops it."""
        return cast("grpc.aio.Server", self._registered)

    def on_drain(self, name: str, hook: Callable[[], Awaitable[None]], *, order: int = 0) -> None:
        """Run `hook` when the process is told to end, lower `order` first, while calls are still answered.

        When all hooks are done, streams that are still open end with UNAVAILABLE and other calls may finish. Hooks
        share the shutdown time; the one that uses it up is given up.
        """
        self._hooks.append(_DrainHook(order, name, hook))

    def shut_down(self) -> None:
        """End the process as a SIGTERM does."""
        self._stop.set()

    async def stopped(self) -> int:
        """Wait until the process is to end; the exit code it should have."""
        await self._stop.wait()
        return EXIT_FAILED if self._failed else 0

    async def _drain(self, until: float) -> None:
        self.draining.set()
        self.health.drain()
        for hook in sorted(self._hooks, key=lambda hook: hook.order):
            try:
                async with asyncio.timeout(until - time.monotonic()):
                    await hook.run()
            except TimeoutError:
                logger.error("shutdown time is over, step given up", extra={"step": hook.name})
            except Exception:
                logger.exception("shutdown step failed", extra={"step": hook.name})

    def _task_died(self, _name: str) -> None:
        self._failed = True
        self._stop.set()


@dataclass(frozen=True, slots=True)
class _DrainHook:
    order: int
    name: str
    run: Callable[[], Awaitable[None]]


class _Registered:
    """The server as the generated code sees it, noting which services it gets."""

    def __init__(self, server: grpc.aio.Server) -> None:
        self._server = server
        self.services: list[str] = []

    def add_registered_method_handlers(self, service_name: str, method_handlers: Mapping[str, Any]) -> None:
        self.services.append(service_name)
        self._server.add_registered_method_handlers(service_name, method_handlers)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)


Build = Callable[[App[_S]], AbstractAsyncContextManager[None]]


def run(settings_class: type[_S], name: str, build: Build[_S]) -> NoReturn:
    """The whole life of a service process; never returns. Exit code 0 after a clean stop, 2 when started wrongly."""
    settings = load(settings_class)
    give_back()
    # Serving allocates much and makes few cycles: collecting as often as usual takes up to a fifth of the time of a hot
    # path, and each whole collection looks at everything that was ever imported.
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)
    sys.exit(uvloop.run(serve(settings, name, build)))


async def serve(settings: _S, name: str, build: Build[_S]) -> int:
    """Run the service until a SIGTERM or SIGINT, or until one of its critical tasks dies; the exit code.

    A second signal ends the process at once.
    """
    traces = telemetry.setup(settings, name)
    signals = _Signals()
    try:
        async with signals, started(settings, name, build) as app:
            signals.on_first(app.shut_down)
            app.tasks.repeat("memory", Spare().look, every=LOOK_SECONDS)
            code = await app.stopped()
            logger.info("shutting down", extra={"exit_code": code})
        return code
    except StartupError as error:
        print(f"hearth {name}: {error}", file=sys.stderr)
        return error.exit_code
    except asyncio.CancelledError:
        if not signals.seen:
            raise
        logger.info("told to end while starting")
        return 0
    except Exception:
        logger.exception("service failed")
        return EXIT_FAILED
    finally:
        await asyncio.to_thread(traces.shutdown)


@asynccontextmanager
async def started(
    settings: _S, name: str, build: Build[_S], *, scopes: Mapping[str, Scope] = SCOPES
) -> AsyncIterator[App[_S]]:
    """The service, bound and serving while the block runs; leaving the block shuts it down in order.

    Raises `StartupError` when the port is taken, the auth file or a certificate is wrong, and whatever `build`
    raises.
    """
    tokens = TokenFile(settings.auth_file, settings.quota) if settings.auth_file is not None else None
    streams = Streams()
    interceptors = [
        TelemetryInterceptor(),
        ErrorInterceptor(streams),
        AuthInterceptor(
            tokens,
            streams,
            recheck=settings.auth_recheck,
            scopes=scopes,
            limits=Limits(clock=time.monotonic),
        ),
    ]
    server = new_server(interceptors=interceptors, options=_options(settings))
    tls = server_tls(settings)
    app = App(settings, name, server, _bind(server, settings, tls), streams)
    if tls is not None:
        app.readings.watch_number(CERTIFICATE_ENDS, tls.ends)
    try:
        async with _measured(app), build(app):
            await _open(app, server)
            logger.info("serving", extra={"address": app.address, "services": app._registered.services})
            try:
                yield app
            finally:
                await _close(app, server)
    finally:
        await app.tasks.stop()
        await server.stop(None)


@asynccontextmanager
async def _measured(app: App[Any]) -> AsyncIterator[None]:
    """The metrics of the process, for whoever they are for, from before its start to after its last call."""
    settings = app.settings
    app.readings.watch_number(DEPENDENCY, lambda: app.health.answering)
    app.readings.watch_number(TASKS, lambda: len(asyncio.all_tasks()))
    if settings.otlp_endpoint:
        app.tasks.repeat("readings", app.readings.refresh, every=_READINGS_EVERY_SECONDS)
    if not settings.metrics_listen:
        yield
        return
    tls = page_context(settings) if settings.metrics_tls else None
    async with metrics_page(settings.metrics_listen, app.readings, tls) as address:
        if settings.metrics_address_file is not None:
            await asyncio.to_thread(_write_whole, settings.metrics_address_file, address)
        yield


async def _open(app: App[Any], server: grpc.aio.Server) -> None:
    services = list(app._registered.services)
    health_pb2_grpc.add_HealthServicer_to_server(app.health.servicer, server)
    own = [health_pb2.DESCRIPTOR.services_by_name["Health"].full_name, reflection.SERVICE_NAME]
    reflection.enable_server_reflection([*services, *own], server)
    await app.health.begin(services)
    app.tasks.start("health", app.health.watch())
    await server.start()
    # A process whose port has closed looks well, and is not.
    app.tasks.start("server", served(server))
    if app.settings.address_file is not None:
        await asyncio.to_thread(_write_whole, app.settings.address_file, app.address)


async def _close(app: App[Any], server: grpc.aio.Server) -> None:
    began = time.monotonic()
    until = began + max(app.settings.shutdown_grace - _CLOSING_SECONDS, app.settings.shutdown_grace / 2)
    await app._drain(until)
    logger.info("drained", extra={"seconds": round(time.monotonic() - began, 1), "streams": len(app._streams)})
    stopping = asyncio.create_task(server.stop(max(0.0, until - time.monotonic())))
    # From here on no new call is taken, so no stream is missed.
    await asyncio.sleep(0)
    app._streams.close(shutting_down())
    if not (await asyncio.wait([stopping], timeout=_STREAM_END_SECONDS))[0]:
        # A reader that takes nothing cannot take the end of its stream either: only other calls are waited for.
        answered = asyncio.create_task(app._streams.single.idle.wait())
        await asyncio.wait([stopping, answered], return_when=asyncio.FIRST_COMPLETED)
        answered.cancel()
        if not stopping.done():
            await server.stop(None)
        await stopping
    logger.info("calls ended", extra={"seconds": round(time.monotonic() - began, 1)})
    await app.tasks.stop()


def _options(settings: ChassisSettings) -> tuple[tuple[str, Any], ...]:
    return (
        # It is on by default: a second server on the same port would silently take half of the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        # Clients ping every 30 s; a server that allows less than that answers GOAWAY too_many_pings.
        ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.keepalive_time_ms", 30_000),
        ("grpc.keepalive_timeout_ms", 10_000),
        # Without it a ping may go unanswered for a minute, whatever the option above says.
        ("grpc.http2.ping_timeout_ms", 10_000),
        ("grpc.max_connection_age_ms", round(settings.connection_age * 1000)),
        ("grpc.max_connection_age_grace_ms", round(settings.connection_age_grace * 1000)),
        ("grpc.server.max_pending_requests", _MAX_PENDING_REQUESTS),
        ("grpc.server.max_pending_requests_hard_limit", _MAX_PENDING_REQUESTS),
        ("grpc.http2.bdp_probe", 0),
    )


def _bind(server: grpc.aio.Server, settings: ChassisSettings, tls: ServerTls | None) -> str:
    wanted = Address.parse(settings.listen)
    try:
        if tls is not None:
            port = server.add_secure_port(str(wanted), tls.credentials)
        else:
            port = server.add_insecure_port(str(wanted))
    except RuntimeError:
        raise StartupError(
            f"cannot listen on {wanted}: {_bind_trouble(wanted)}; set HEARTH_LISTEN to another host:port",
            exit_code=EXIT_USAGE,
        ) from None
    return str(Address(wanted.host, port))


def _bind_trouble(wanted: Address) -> str:
    """Why the port cannot be bound: gRPC does not say, the same attempt with a plain socket does."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            wanted.host, wanted.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as attempt:
            attempt.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            attempt.bind(address)
            attempt.listen()
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return "gRPC refused it"


def _write_whole(path: Path, text: str) -> None:
    """Write so that a reader sees the whole text or no file."""
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(text)
    draft.replace(path)


class _Signals:
    """SIGTERM and SIGINT: the first ends the process in order (or cancels its start), the second at once."""

    _WATCHED = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self.seen = False
        self._first: Callable[[], object] | None = None

    async def __aenter__(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._first = task.cancel
        for number in self._WATCHED:
            asyncio.get_running_loop().add_signal_handler(number, self._received, number)

    async def __aexit__(self, *_: object) -> None:
        # The handlers stay: a signal that comes now, while the last spans are sent, must not kill the process halfway.
        self._first = None

    def on_first(self, act: Callable[[], object]) -> None:
        """What the first signal does from now on; done at once if it has come already."""
        self._first = act
        if self.seen:
            act()

    def _received(self, number: int) -> None:
        if self.seen:
            logger.warning("second signal, ending at once")
            os._exit(128 + number)
        self.seen = True
        if self._first is not None:
            self._first()
