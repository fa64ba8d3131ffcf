"""`hearth doctor`: is everything there, does anything leak, what is kept warm, and what does it cost now."""

from __future__ import annotations

import asyncio
import dataclasses
import ssl
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, Any, TypeVar

import grpc
import grpc.aio
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.markup import escape

from hearth.channel import open_channel
from hearth.cli import words
from hearth.cli.diagnosis import NO_ANSWER, NOT_SERVING, SERVING, Finding, Picture, Service, findings, notes
from hearth.cli.output import as_dict, err, out, print_json, run
from hearth.cli.pool import all_entries, all_replicas, share
from hearth.cli.reaching import addresses, connected, tls, token
from hearth.cli.sandboxes import PAGE, sandboxes
from hearth.cli.stack import DEFAULT_ROOT, Json, Root
from hearth.cli.words import tls_hint
from hearth.client import Client
from hearth.errors import FAILED_CALLS, DeadlineExceeded, Unavailable, read_error
from hearth.paging import CALL_SECONDS
from hearth.pool.v1 import pool_pb2, pool_service_pb2, pool_service_pb2_grpc
from hearth.sandbox.v1 import sandbox_service_pb2
from hearth.tls import Pair, Tls
from hearth.version import VERSION_KEY, version

GOOD, FOUND, SILENT = 0, 1, 2
HEALTH_SECONDS = 5.0
# A reconcile asks every provider, and waits for what it deletes.
RECONCILE_SECONDS = 120.0
# What a service depends on has a health of its own.
DEPENDENCIES = {
    "pool": ("postgres",),
    "history": ("postgres",),
    "relay": ("valkey", "history"),
    "sandbox": ("postgres",),
}
_AWAY = (Unavailable, DeadlineExceeded)
_FORBIDDEN = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)

_T = TypeVar("_T")


def register(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command()(doctor)


def doctor(
    live: Annotated[
        bool, typer.Option("--live-daytona", help="instead make, use and delete one sandbox on the real Daytona")
    ] = False,
    max_minutes: Annotated[float, typer.Option(min=0.5, max=60, help="hard limit of --live-daytona")] = 5.0,
    root: Root = DEFAULT_ROOT,
    json: Json = False,
) -> None:
    """Look at all of a deployment: services, certificates, settings, leaks, orphans, unknown instances, warm use, cost.

    It has the sandbox service compare its rows with the providers, which mends what differs, as it does by itself every
    half minute. Exit code 0 when all is good, 1 when something was found, 2 when something did not answer.
    """
    if live:
        # What it needs would slow down every other command.
        from hearth.cli import live_daytona

        raise typer.Exit(live_daytona.check(max_minutes=max_minutes, json=json))
    picture = run(_look(root))
    found = findings(picture)
    if json:
        print_json(_as_json(picture, found))
    else:
        _print(picture, found)
    if not picture.answered:
        raise typer.Exit(SILENT)
    raise typer.Exit(FOUND if found else GOOD)


async def _look(root: Path) -> Picture:
    where, bearer, how, caller = addresses(root), token(), tls(root), connected(root)
    services = await asyncio.gather(
        *(_service(name, getattr(where, name), how) for name in ("pool", "history", "relay", "sandbox"))
    )
    picture = Picture(services, version(), has_token=bool(bearer), encrypted=how is not None)
    up = {service.name for service in services if service.state != NO_ANSWER}
    unchecked: dict[str, str] = {}
    async with caller as client:
        if "pool" in up:
            await _ask_pool(client, picture, unchecked)
        if "sandbox" in up:
            await _ask_sandbox(client, picture, unchecked)
        if "pool" in up and picture.stats is not None:
            # Asked on both sides of the listing of sandboxes: an agent that came or went meanwhile is no leak.
            kept = await _asked("entries", unchecked, lambda: _kept(client))
            picture.kept = picture.kept | (kept or frozenset())
    picture.open_to_all = picture.stats is not None and await _open_to_all(where.pool, bearer, how)
    picture.unchecked = unchecked
    return picture


async def _service(name: str, address: str, how: Tls | None) -> Service:
    started = time.monotonic()
    async with open_channel(address, tls=how, options=(("grpc.enable_retries", 0),)) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        call = stub.Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_SECONDS)
        try:
            answer = await call
        except grpc.aio.AioRpcError as error:
            detail = error.details() or error.code().name
            hint = tls_hint(detail)
            return Service(name, address, NO_ANSWER, detail=f"{detail}; {hint}" if hint else detail)
        milliseconds = round((time.monotonic() - started) * 1000, 1)
        told = dict(await call.trailing_metadata() or ()).get(VERSION_KEY, "")
        told = told if isinstance(told, str) else ""
        days = await _certificate_days(address) if how is not None else None
        away = [dependency for dependency in DEPENDENCIES[name] if not await _well(stub, dependency)]
        detail = f"{', '.join(away)} does not answer" if away else ""
        if answer.status == health_pb2.HealthCheckResponse.SERVING:
            return Service(name, address, SERVING, told, milliseconds, detail, days)
        return Service(name, address, NOT_SERVING, told, milliseconds, detail or "it is ending", days)


async def _certificate_days(address: str) -> float | None:
    """Of the replica at `address` whose certificate ends first; None when not all could be looked at.

    That the certificates are good ones was seen by the call before.
    """
    try:
        return min(await asyncio.gather(*(asyncio.to_thread(_days_left, one) for one in address.split(","))))
    except (OSError, ValueError):
        return None


def _days_left(address: str) -> float:
    # Takes longer to import than most commands take.
    from hearth.certificates import ends_at

    host, _, port = address.strip().rpartition("/")[2].rpartition(":")
    shown = ssl.get_server_certificate((host.strip("[]"), int(port)), timeout=HEALTH_SECONDS)
    return round((ends_at(Pair(shown.encode(), b"")).timestamp() - time.time()) / 86_400, 1)


async def _well(stub: health_pb2_grpc.HealthStub, dependency: str) -> bool:
    try:
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=dependency), timeout=HEALTH_SECONDS)
    except grpc.aio.AioRpcError as error:
        # One that the service does not know cannot be what is wrong with it.
        return error.code() is grpc.StatusCode.NOT_FOUND
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def _ask_pool(client: Client, picture: Picture, unchecked: dict[str, str]) -> None:
    picture.stats = await _asked(
        "pool stats",
        unchecked,
        lambda: client.pools.GetPoolStats(pool_service_pb2.GetPoolStatsRequest(), timeout=CALL_SECONDS),
    )
    picture.replicas = await _asked("replicas", unchecked, lambda: _replicas(client))
    picture.kept = await _asked("entries", unchecked, lambda: _kept(client)) or frozenset()


async def _ask_sandbox(client: Client, picture: Picture, unchecked: dict[str, str]) -> None:
    stub = client.sandboxes
    picture.reconciled = await _asked(
        "unknown instances",
        unchecked,
        lambda: stub.Reconcile(sandbox_service_pb2.ReconcileRequest(), timeout=RECONCILE_SECONDS),
    )
    picture.usage = await _asked(
        "usage", unchecked, lambda: stub.GetUsage(sandbox_service_pb2.GetUsageRequest(), timeout=CALL_SECONDS)
    )

    async def listed() -> list[Any]:
        request = sandbox_service_pb2.ListSandboxesRequest(page_size=PAGE)
        return [sandbox async for sandbox in sandboxes(client, request)]

    picture.sandboxes = await _asked("sandboxes", unchecked, listed)


async def _asked(what: str, unchecked: dict[str, str], ask: Callable[[], Awaitable[_T]]) -> _T | None:
    """The answer; None, and why in `unchecked`, where there is none."""
    try:
        return await ask()
    except FAILED_CALLS as failed:
        error = read_error(failed)
        if isinstance(error, _AWAY):
            unchecked[what] = NO_ANSWER
            return None
        if error.code in _FORBIDDEN:
            unchecked[what] = f"needs an admin token of all projects ({error.reason or error.code.name})"
            return None
        raise


async def _open_to_all(address: str, bearer: str, how: Tls | None) -> bool:
    """Whether an operator's question is answered without a token."""
    if not bearer:
        return True
    async with open_channel(address, tls=how) as channel:
        stub = pool_service_pb2_grpc.PoolServiceStub(channel)
        try:
            await stub.GetPoolStats(pool_service_pb2.GetPoolStatsRequest(), timeout=CALL_SECONDS)
        except grpc.aio.AioRpcError:
            return False
    return True


async def _replicas(client: Client) -> list[pool_pb2.Replica]:
    return [replica async for replica in all_replicas(client)]


async def _kept(client: Client) -> frozenset[str]:
    return frozenset([entry.sandbox_id async for entry in all_entries(client)])


def _as_json(picture: Picture, found: list[Finding]) -> dict[str, object]:
    return {
        "version": picture.own_version,
        "services": [dataclasses.asdict(service) for service in picture.services],
        "findings": [dataclasses.asdict(finding) for finding in found],
        "notes": notes(picture),
        "unchecked": dict(picture.unchecked),
        "usage": as_dict(picture.usage) if picture.usage is not None else None,
        "pool": as_dict(picture.stats) if picture.stats is not None else None,
        "reconciled": as_dict(picture.reconciled) if picture.reconciled is not None else None,
    }


def _print(picture: Picture, found: list[Finding]) -> None:
    colours = {SERVING: "green", NOT_SERVING: "yellow", NO_ANSWER: "red"}
    for service in picture.services:
        colour = colours[service.state]
        told = f"{service.version:<8} {service.milliseconds:>6.1f} ms" if service.version else escape(service.detail)
        more = f"  {escape(service.detail)}" if service.version and service.detail else ""
        out.print(
            f"{service.name:<8} [{colour}]{service.state:<11}[/{colour}] {service.address:<21} {told}{more}",
            soft_wrap=True,
        )
    if picture.usage is not None:
        now = sum(tier.micro_usd_per_hour for tier in picture.usage.tiers)
        worst = sum(slot.worst_micro_usd_per_hour for slot in picture.usage.slots)
        counts = ", ".join(f"{t.count} {t.tier} on {t.provider}" for t in picture.usage.tiers if t.count)
        out.print(f"sandboxes {counts or 'none'}; {words.dollars(now)} an hour now", soft_wrap=True)
        slots = ", ".join(f"{slot.used} of {slot.cap} slots of {slot.provider}" for slot in picture.usage.slots)
        out.print(f"warm      {slots}; {words.dollars(worst)} an hour with all of them taken", soft_wrap=True)
    if picture.stats is not None:
        states = ", ".join(f"{count} {name.lower()}" for name, count in sorted(picture.stats.entries_by_state.items()))
        misses = ", ".join(f"{count} {name}" for name, count in sorted(picture.stats.misses_by_reason.items()))
        warm = f"{share(picture.stats.turns_by_how)} warm" if picture.stats.turns_by_how else "no turns yet"
        out.print(f"agents    {states or 'none'}; {warm}{f'; not warm by {misses}' if misses else ''}", soft_wrap=True)
    for note in notes(picture):
        out.print(f"[dim]note      {escape(note)}[/dim]", soft_wrap=True)
    for what, why in picture.unchecked.items():
        out.print(f"[yellow]unchecked {escape(what)}: {escape(why)}[/yellow]", soft_wrap=True)
    for finding in found:
        hint = f" [dim]{escape(finding.hint)}[/dim]" if finding.hint else ""
        err.print(f"[red]{finding.about:<9}[/red] {escape(finding.message)}{hint}", soft_wrap=True)
    if picture.answered and not found:
        out.print("[green]all is good[/green]")
