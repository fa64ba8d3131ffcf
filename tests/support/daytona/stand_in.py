"""The stand-in as a whole: its start, its end, and what a test asks of it."""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from tests.support.daytona import checks
from tests.support.daytona.admin import AdminApi
from tests.support.daytona.api import SandboxApi, Signed, Urls
from tests.support.daytona.delays import Delays
from tests.support.daytona.events import Events
from tests.support.daytona.faults import Faults
from tests.support.daytona.files import FileApi
from tests.support.daytona.fleet import Fleet, Setting
from tests.support.daytona.journal import Journal
from tests.support.daytona.limits import Quotas, RateLimiter, RateLimits
from tests.support.daytona.organization import OrganizationApi, Secrets
from tests.support.daytona.preview import Preview
from tests.support.daytona.problems import Problem
from tests.support.daytona.sandbox import Sandbox
from tests.support.daytona.serving import Gate
from tests.support.daytona.sessions import SessionApi
from tests.support.daytona.toolbox import ProcessApi, Toolboxes
from tests.support.daytona.volumes import LOCK, VOLUMES, Volumes, locked

HOST = "127.0.0.1"
_BIGGEST_UPLOAD = 1 << 30
_SHUTDOWN_SECONDS = 0.2
# What marks the processes of a test run goes on to everything that the run starts.
_INHERITED = ("HEARTH_TEST_RUN", "HEARTH_STACK_ROOT")


@dataclass(frozen=True, slots=True)
class Options:
    """How a stand-in behaves.

    `minute`: seconds that a minute of auto-stop, auto-delete and the like lasts. `patience`: seconds for which create
    and start wait before they answer. `snapshots`: those that exist, None for any. `events`: whether Socket.IO is
    served; without, the SDK polls. `inherit`: variables of this process that sandboxes see too.
    """

    delays: Delays = field(default_factory=Delays)
    agent_command: Sequence[str] = ()
    port: int = 0
    quotas: Quotas = field(default_factory=Quotas)
    rate_limits: RateLimits = field(default_factory=RateLimits)
    minute: float = 60.0
    patience: float = 30.0
    snapshots: Sequence[str] | None = None
    default_snapshot: str = "daytonaio/sandbox"
    events: bool = True
    inherit: Sequence[str] = ()
    api_key: str = ""


class RunningStandIn:
    """A stand-in that serves."""

    def __init__(self, url: str, api_key: str, faults: Faults, log: Journal, fleet: Fleet, volumes: Volumes) -> None:
        self.url = url
        """For `api_url` of the SDK."""
        self.api_key = api_key
        self.faults = faults
        self.log = log
        self.volumes = volumes
        self._fleet = fleet

    def running(self) -> int:
        """How many sandboxes cost processor and memory now, those on their way in or out included."""
        return self._fleet.running()

    def counts(self) -> Mapping[str, int]:
        """How many sandboxes are in each state, destroyed ones included."""
        return self._fleet.counts()

    def sandboxes(self) -> Sequence[Sandbox]:
        """All that are not destroyed, oldest first."""
        return self._fleet.all()

    def sandbox(self, reference: str) -> Sandbox:
        """By id or name. Raises `Problem` when there is none."""
        return self._fleet.find(reference)

    def kill(self, reference: str) -> None:
        """Let a sandbox die as a machine does; it ends in `error`."""
        self._fleet.kill(self._fleet.find(reference))

    def release(self) -> None:
        """Let every stuck transition go on."""
        self._fleet.release()

    def overlaps(self) -> Sequence[checks.Overlap]:
        """Where two sandboxes of one session accepted harness traffic at once; there must be none."""
        return checks.overlaps(self.log, time.monotonic())

    def usage(self) -> checks.Usage:
        """Seconds that cost money so far."""
        return checks.usage(list(self.log), time.monotonic())

    def most_running(self) -> int:
        """The greatest number of sandboxes that cost processor and memory at one time."""
        return checks.most_at_once(checks.charged(self.log, time.monotonic()))

    def most_idle(self, grace: float) -> int:
        """The greatest number of sandboxes that ran at one time while nobody used them; `grace` as in `checks.idle`."""
        return checks.most_at_once(checks.idle(list(self.log), time.monotonic(), grace))


class StandIn:
    """Makes them."""

    @staticmethod
    def running(
        directory: Path,
        *,
        delays: Delays | None = None,
        agent_command: Sequence[str] = (),
        port: int = 0,
        quotas: Quotas | None = None,
        rate_limits: RateLimits | None = None,
        minute: float = 60.0,
        patience: float = 30.0,
        snapshots: Sequence[str] | None = None,
        events: bool = True,
        inherit: Sequence[str] = (),
    ) -> AbstractAsyncContextManager[RunningStandIn]:
        """Serve on loopback from `directory` until the context ends; then no process and no link of it is left.

        `agent_command` is what `sandbox-agent` means in a sandbox; arguments given to it are added. The rest as in
        `Options`.
        """
        return serve(
            directory,
            Options(
                delays=delays or Delays.none(),
                agent_command=agent_command,
                port=port,
                quotas=quotas or Quotas(),
                rate_limits=rate_limits or RateLimits(),
                minute=minute,
                patience=patience,
                snapshots=snapshots,
                events=events,
                inherit=inherit,
            ),
        )


@asynccontextmanager
async def serve(directory: Path, options: Options) -> AsyncIterator[RunningStandIn]:
    """As `StandIn.running`."""
    directory = directory.absolute()
    directory.mkdir(parents=True, exist_ok=True)
    lock = (directory / LOCK).open("w")
    if not locked(lock):
        lock.close()
        raise RuntimeError(f"another stand-in serves from {directory}")
    listener = socket.create_server((HOST, options.port), backlog=1024)
    origin = f"http://{HOST}:{listener.getsockname()[1]}"
    urls = Urls(f"{origin}/toolbox", f"{origin}/preview")
    api_key = options.api_key or f"dtn_{secrets.token_hex(16)}"
    journal, faults, stored, signed = Journal(), Faults(options.delays.seed), Secrets(), Signed({})
    volumes = Volumes(directory / VOLUMES)
    setting = Setting(
        directory=directory,
        delays=options.delays,
        quotas=options.quotas,
        minute=options.minute,
        agent_command=tuple(options.agent_command),
        inherit=(*_INHERITED, *options.inherit),
    )
    async with AsyncExitStack() as stack:
        stack.callback(lock.close)
        stack.callback(listener.close)
        fleet = Fleet(setting, journal, volumes)
        stack.push_async_callback(fleet.close)
        stand_in = RunningStandIn(f"{origin}/api", api_key, faults, journal, fleet, volumes)
        preview = Preview(fleet, signed, journal, options.delays)
        stack.push_async_callback(preview.close)
        gate = Gate(api_key, faults, journal, RateLimiter(options.rate_limits), options.delays, _finder(fleet))
        snapshots, default = options.snapshots, options.default_snapshot
        api = SandboxApi(
            fleet, stored, signed, urls, patience=options.patience, snapshots=snapshots, default_snapshot=default
        )
        toolboxes = Toolboxes(fleet)
        app = web.Application(client_max_size=_BIGGEST_UPLOAD)
        app.add_routes(_below("/api", api.routes(gate)))
        app.add_routes(_below("/api", OrganizationApi(fleet, stored, snapshots, default).routes(gate)))
        toolbox = "/toolbox/{sandbox}"
        app.add_routes(_below(toolbox, ProcessApi(toolboxes, journal, options.delays).routes(gate)))
        app.add_routes(_below(toolbox, SessionApi(toolboxes, journal).routes(gate)))
        app.add_routes(_below(toolbox, FileApi(toolboxes).routes(gate)))
        app.add_routes(preview.routes(gate))
        app.add_routes(AdminApi(stand_in).routes())
        if options.events:
            events = Events(app, fleet, api_key, urls.toolbox)
        # A caller that goes away ends its handler, and with it what a fault delays; what was begun goes on in tasks of
        # the fleet.
        runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=_SHUTDOWN_SECONDS)
        await runner.setup()
        stack.push_async_callback(runner.cleanup)
        if options.events:
            stack.push_async_callback(events.close)
        await web.SockSite(runner, listener).start()
        yield stand_in


def _below(prefix: str, routes: Sequence[web.RouteDef]) -> Sequence[web.RouteDef]:
    return [web.RouteDef(route.method, prefix + route.path, route.handler, route.kwargs) for route in routes]


def _finder(fleet: Fleet) -> Callable[[str], Sandbox | None]:
    def find(reference: str) -> Sandbox | None:
        try:
            return fleet.find(reference)
        except Problem:
            return None

    return find
