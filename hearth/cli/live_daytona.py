"""`hearth doctor --live-daytona`: one sandbox on the real service, from create to delete, within minutes and cents.

It uses the provider of the sandbox service itself, so what it sees is what turns will meet. Everything that it makes
carries a label of this one run, and is deleted whatever happens; besides, Daytona's own timers stop and delete it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib.util
import os
import secrets
import signal
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
from rich.markup import escape

from hearth.cli import words
from hearth.cli.output import err, out, print_json
from hearth.secret import Secret

if TYPE_CHECKING:
    from services.sandbox.providers.daytona_options import DaytonaOptions
    from services.sandbox.providers.port import Address, Provider

GOOD, FOUND, SILENT = 0, 1, 2
# Kept back from the limit for deleting what was made.
CLEANING_SHARE = 0.25
CALL_SECONDS = 30.0
DAEMON_SECONDS = 20.0
LABEL = "hearth-doctor"
_OK, _UNAUTHORIZED = 200, 401

_T = TypeVar("_T")


@dataclasses.dataclass(frozen=True, slots=True)
class Stage:
    """One step. `outcome` is `ok` or what went wrong."""

    name: str
    seconds: float
    outcome: str = "ok"


@dataclasses.dataclass(slots=True)
class Check:
    """What the run found. Counts are of instances that the key may see; None: not counted. `left` are those of this run
    that were not shown gone. `authorization_passes` is None when it was not tried."""

    run: str
    stages: list[Stage] = dataclasses.field(default_factory=list)
    before: int | None = None
    after: int | None = None
    left: int | None = None
    authorization_passes: bool | None = None
    running_seconds: float = 0.0
    cost_micro_usd: int = 0
    answered: bool = True

    def problems(self) -> list[str]:
        """In words; empty when all is good."""
        found = [f"{stage.name}: {stage.outcome}" for stage in self.stages if stage.outcome != "ok"]
        if self.authorization_passes is False:
            found.append(
                "Authorization does not pass the preview proxy: with this account a change of holder has to delete"
                " the sandbox"
            )
        if self.left:
            found.append(f"{self.left} instances with the label {LABEL}={self.run} are still there: delete them")
        if self.left is None:
            found.append(f"it is not known whether anything with the label {LABEL}={self.run} is still there: look")
        return found


def check(*, max_minutes: float, json: bool) -> int:
    """Run it and say what came of it; the exit code."""
    found = asyncio.run(_run(max_minutes * 60))
    problems = found.problems()
    if json:
        print_json({**dataclasses.asdict(found), "problems": problems})
    else:
        _print(found, problems)
    if not found.answered:
        return SILENT
    return FOUND if problems else GOOD


async def _run(limit: float) -> Check:
    found = Check(uuid.uuid4().hex[:12])
    task = asyncio.current_task()
    assert task is not None
    # As an interrupt, which asyncio turns into a cancellation itself: what was made is deleted first.
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    ends = time.monotonic() + limit
    try:
        async with _daytona() as (provider, price):
            await _with(provider, found, ends, limit)
            found.cost_micro_usd = round(found.running_seconds / 3600 * price * 1_000_000)
    except _Unusable as error:
        found.stages.append(Stage("connect", 0.0, str(error)))
        found.answered = False
        found.left = 0
    except asyncio.CancelledError:
        # Told to end: what was made is deleted by now, and what came of it is said.
        task.uncancel()
    return found


async def _with(provider: Provider, found: Check, ends: float, limit: float) -> None:
    from services.sandbox.providers.port import ProviderError

    labels = {LABEL: found.run}
    try:
        found.before = len(await asyncio.wait_for(provider.list({}), CALL_SECONDS))
    except (ProviderError, TimeoutError) as error:
        found.stages.append(Stage("count", 0.0, _why(error)))
        found.answered = False
        # Nothing was made.
        found.left = 0
        return
    started = time.monotonic()
    try:
        async with asyncio.timeout_at(asyncio.get_running_loop().time() + limit * (1 - CLEANING_SHARE)):
            await _life(provider, found, labels)
    except TimeoutError:
        found.stages.append(Stage("limit", limit, "the time was over before the last stage"))
    except (ProviderError, aiohttp.ClientError):
        pass  # its stage says so
    finally:
        # Also when the program is interrupted: the deleting is shielded, and bounded by what is left of the limit.
        await asyncio.shield(_clean(provider, found, labels, max(10.0, ends - time.monotonic())))
        found.running_seconds = round(time.monotonic() - started, 1)


async def _life(provider: Provider, found: Check, labels: dict[str, str]) -> None:
    from services.sandbox.compatibility import Spec
    from services.sandbox.providers.port import CreateRequest, DaemonFailed, DaemonRequest
    from services.sandbox.rows import Key

    key = Key(LABEL, found.run)
    request = CreateRequest(f"{LABEL}-{found.run}", labels, key, Spec(provider="daytona", agent=LABEL))
    instance = await _stage(found, "create", lambda: provider.create(request))
    reference = instance.provider_id

    def daemon() -> DaemonRequest:
        return DaemonRequest(token=Secret(secrets.token_urlsafe(32)), key=key, agents={}, env={}, secrets={})

    wanted = daemon()
    try:
        address = await _stage(found, "daemon", lambda: provider.restart_daemon(reference, wanted))
    except DaemonFailed:
        # A daemon that never saw its token looks from here as one that does not answer.
        if await _health(await provider.endpoint(reference), wanted.token.reveal()) == _UNAUTHORIZED:
            found.authorization_passes = False
        raise
    await _stage(found, "authorization", lambda: _authorized(found, address, wanted.token.reveal()))
    await _stage(found, "stop", lambda: provider.stop(reference))
    await _stage(found, "start", lambda: provider.start(reference))
    again = daemon()
    address = await _stage(found, "daemon again", lambda: provider.restart_daemon(reference, again))
    await _stage(found, "old token", lambda: _fenced(address, wanted.token.reveal(), again.token.reveal()))


async def _clean(provider: Provider, found: Check, labels: dict[str, str], seconds: float) -> None:
    """Delete whatever carries the label of this run, until the provider lists nothing of it."""
    from services.sandbox.providers.port import ProviderError

    async def gone() -> None:
        while True:
            try:
                instances = await provider.list(labels)
                found.left = len(instances)
                if not instances:
                    break
                for instance in instances:
                    await provider.delete(instance.provider_id)
            except ProviderError as error:
                err.print(f"[yellow]deleting: {escape(str(error))}[/yellow]", soft_wrap=True)
                await asyncio.sleep(1.0)
        found.after = len(await provider.list({}))

    with contextlib.suppress(TimeoutError, ProviderError):
        await _stage(found, "delete", lambda: asyncio.wait_for(gone(), seconds))


async def _stage(found: Check, name: str, work: Callable[[], Awaitable[_T]]) -> _T:
    started = time.monotonic()
    try:
        result = await work()
    except BaseException as error:
        found.stages.append(Stage(name, round(time.monotonic() - started, 3), _why(error)))
        raise
    found.stages.append(Stage(name, round(time.monotonic() - started, 3)))
    return result


async def _authorized(found: Check, address: Address, token: str) -> None:
    """Whether the daemon, which answers nobody without its token, sees the token through the proxy."""
    with_token = await _health(address, token)
    without = await _health(address, None)
    found.authorization_passes = with_token == _OK and without == _UNAUTHORIZED


async def _fenced(address: Address, old: str, new: str) -> None:
    from services.sandbox.providers.port import DaemonFailed

    if (await _health(address, new), await _health(address, old)) != (_OK, _UNAUTHORIZED):
        raise DaemonFailed("the daemon that was started anew still takes the token of the one before")


async def _health(address: Address, token: str | None) -> int:
    headers = dict(address.headers) | ({"Authorization": f"Bearer {token}"} if token is not None else {})
    timeout = aiohttp.ClientTimeout(total=CALL_SECONDS)
    async with (
        aiohttp.ClientSession(timeout=timeout) as session,
        session.get(f"{address.url}/v1/health", headers=headers) as answer,
    ):
        return answer.status


class _Unusable(Exception):
    """There is no Daytona to be asked; the message says what to set."""


@contextlib.asynccontextmanager
async def _daytona() -> AsyncIterator[tuple[Provider, float]]:
    """The provider as the settings describe it, and the price of an hour of one sandbox."""
    if importlib.util.find_spec("daytona") is None:
        raise _Unusable("the Daytona SDK is not installed: pip install 'hearth[daytona]'")
    from services.chassis.clock import SystemClock, SystemIds
    from services.sandbox.providers.daytona import DaytonaProvider

    options, price = _options()
    provider = await DaytonaProvider.connect(options, SystemClock(), SystemIds())
    try:
        yield provider, price
    finally:
        await provider.close()


def _options() -> tuple[DaytonaOptions, float]:
    """As the sandbox service reads them, but without a volume: what this run makes must all go with its sandbox.

    What the SDK itself reads from the environment stands in for what is not set.
    """
    from pydantic import ValidationError

    from services.chassis.settings import problems
    from services.sandbox.settings import SandboxSettings

    environment = os.environ
    unset = [name for name in ("API_URL", "API_KEY", "TARGET") if not environment.get(f"HEARTH_DAYTONA_{name}")]
    values: dict[str, Any] = {
        f"daytona_{name.lower()}": environment[f"DAYTONA_{name}"]
        for name in unset
        if environment.get(f"DAYTONA_{name}")
    }
    try:
        settings = SandboxSettings(
            postgres_dsn=Secret("postgresql://not-used"), providers=["daytona"], default_provider="daytona", **values
        )
    except ValidationError as error:
        raise _Unusable("; ".join(problems(SandboxSettings, error))) from None
    options = dataclasses.replace(settings.daytona_options(), volume="", daemon_seconds=DAEMON_SECONDS)
    return options, settings.daytona_price_running


def _why(error: BaseException) -> str:
    return "cut off" if isinstance(error, asyncio.CancelledError) else str(error) or type(error).__name__


def _print(found: Check, problems: list[str]) -> None:
    rows = ((stage.name, f"{stage.seconds:.2f} s", stage.outcome) for stage in found.stages)
    out.print(words.table(("stage", "took", ""), rows))
    out.print(
        f"instances before {found.before}, after {found.after}; about {words.dollars(found.cost_micro_usd)} spent",
        soft_wrap=True,
    )
    for problem in problems:
        err.print(f"[red]{escape(problem)}[/red]", soft_wrap=True)
    if not problems:
        out.print("[green]all is good[/green]")
