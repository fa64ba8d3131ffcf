"""`hearth pool`: live agents between turns, the replicas that keep them, and how well that works."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from typing import Annotated

import typer
from rich.markup import escape

from hearth.cli import words
from hearth.cli.output import as_dict, err, out, print_json, run
from hearth.cli.reaching import connected
from hearth.cli.sessions import DEFAULT_PROJECT, Project, Session
from hearth.cli.stack import DEFAULT_ROOT, Json, Root
from hearth.client import Client, session_key
from hearth.errors import CallError, Unavailable
from hearth.paging import CALL_SECONDS, pages
from hearth.pool.v1 import pool_pb2, pool_service_pb2, pool_service_pb2_grpc

# An eviction waits until the sandbox is seen stopped.
EVICT_SECONDS = 120.0
LOOK_SECONDS = 0.5
PAGE = 500
HITS = ("warm", "restarted", "cold")

group = typer.Typer(help=__doc__, no_args_is_help=True)


def register(app: typer.Typer) -> None:
    """Add the commands of this file."""
    app.add_typer(group, name="pool")


@group.command()
def entries(root: Root = DEFAULT_ROOT, json: Json = False) -> None:
    """List the live agents of all replicas, of each one least recently used first."""

    async def work() -> list[pool_pb2.Entry]:
        async with connected(root) as client:
            return [entry async for entry in all_entries(client)]

    found = run(work())
    if json:
        print_json({"entries": [as_dict(entry) for entry in found]})
        return
    if not found:
        out.print("no live agents")
        return
    now = datetime.now(UTC)
    columns = ("session", "state", "agent", "turns", "idle for", "closes in", "sandbox")
    rows = (_entry(entry, now) for entry in found)
    out.print(words.table(columns, rows, whole=("state", "turns", "idle for", "closes in", "sandbox")))


@group.command()
def evict(session: Session, project: Project = DEFAULT_PROJECT, root: Root = DEFAULT_ROOT, json: Json = False) -> None:
    """Close the idle agent of a session and wait until its sandbox is stopped. Its next turn is a restarted one."""

    async def work() -> None:
        key = session_key(project, session)
        async with connected(root) as client:
            holder = (await client.get_session(key)).holder
            async with one_replica(client, holder) as pools:
                await pools.EvictEntry(
                    pool_service_pb2.EvictEntryRequest(session=key, request_id=str(uuid.uuid4())),
                    timeout=EVICT_SECONDS,
                )

    run(work())
    if json:
        print_json({"evicted": {"project": project, "session": session}})
    else:
        out.print(f"[green]evicted[/green] {escape(project)}/{escape(session)}")


@group.command()
def replicas(root: Root = DEFAULT_ROOT, json: Json = False) -> None:
    """List the pool processes that beat lately."""

    async def work() -> list[pool_pb2.Replica]:
        async with connected(root) as client:
            return [replica async for replica in all_replicas(client)]

    found = run(work())
    if json:
        print_json({"replicas": [as_dict(replica) for replica in found]})
        return
    now = datetime.now(UTC)
    rows = (
        (
            replica.holder,
            replica.address,
            "draining" if replica.draining else "serving",
            str(replica.driving),
            str(replica.entries),
            words.since(replica.started_at.ToDatetime(UTC), now),
            words.since(replica.beat_at.ToDatetime(UTC), now),
        )
        for replica in found
    )
    columns = ("holder", "address", "state", "turns", "entries", "up", "last beat")
    out.print(words.table(columns, rows, whole=("holder",)))


@group.command()
def drain(
    holder: Annotated[str, typer.Argument(help="id of the replica, as `hearth pool replicas` shows it")],
    wait: Annotated[bool, typer.Option("--wait", help="until it drives no turn any more")] = False,
    root: Root = DEFAULT_ROOT,
    json: Json = False,
) -> None:
    """Let a replica take no new turns and finish those it has; its idle sandboxes are stopped now.

    It stays so until it is started anew.
    """

    async def work() -> int:
        async with connected(root) as client, one_replica(client, holder) as pools:
            while True:
                # Repeating the call is safe and tells what is left to do.
                answer = await pools.DrainReplica(
                    pool_service_pb2.DrainReplicaRequest(holder=holder, request_id=str(uuid.uuid4())),
                    timeout=EVICT_SECONDS,
                )
                if not wait or not answer.driving:
                    return answer.driving
                await asyncio.sleep(LOOK_SECONDS)

    driving = run(work())
    if json:
        print_json({"holder": holder, "driving": driving})
    else:
        out.print(f"draining, {driving} turns still run" if driving else "[green]drained[/green], no turn runs")


@group.command()
def stats(root: Root = DEFAULT_ROOT, json: Json = False) -> None:
    """Show how turns of the replica that answers were got since it started, and why some were not warm."""

    async def work() -> pool_service_pb2.GetPoolStatsResponse:
        async with connected(root) as client:
            return await client.pools.GetPoolStats(pool_service_pb2.GetPoolStatsRequest(), timeout=CALL_SECONDS)

    found = run(work())
    if json:
        print_json(as_dict(found))
        return
    rows = [
        ("replica", found.holder),
        ("entries", _counts(found.entries_by_state)),
        ("turns", _counts(found.turns_by_how)),
        ("warm", share(found.turns_by_how)),
        ("outcomes", _counts(found.turns_by_outcome)),
        ("not warm by", _counts(found.misses_by_reason)),
        ("outbox", f"{found.outbox_depth} facts wait for history"),
    ]
    out.print(words.table(("", ""), rows))
    for warning in found.warnings:
        err.print(f"[yellow]{escape(warning)}[/yellow]", soft_wrap=True)


@asynccontextmanager
async def one_replica(client: Client, holder: str) -> AsyncIterator[pool_service_pb2_grpc.PoolServiceAsyncStub]:
    """Calls to one replica; to whichever answers when it is the only one, or nobody knows of it."""
    found = [replica async for replica in all_replicas(client)]
    address = next((replica.address for replica in found if replica.holder == holder), "")
    if not address or len(found) == 1:
        yield client.pools
        return
    async with client.replica(address) as channel:
        yield pool_service_pb2_grpc.PoolServiceStub(channel)


async def all_entries(client: Client) -> AsyncIterator[pool_pb2.Entry]:
    """The entries of all replicas, page by page. Of one that does not answer there are none to be had."""
    for replica in [replica async for replica in all_replicas(client)]:
        async with one_replica(client, replica.holder) as pools:
            request = pool_service_pb2.ListEntriesRequest(page_size=PAGE)
            try:
                async for page in pages(pools.ListEntries, request):
                    for entry in page.entries:
                        yield entry
            except CallError as error:
                if not isinstance(error, Unavailable) or pools is client.pools:
                    raise
                err.print(f"[yellow]replica {replica.address} does not answer[/yellow]", soft_wrap=True)


async def all_replicas(client: Client) -> AsyncIterator[pool_pb2.Replica]:
    """All replicas, page by page."""
    request = pool_service_pb2.ListReplicasRequest(page_size=PAGE)
    async for page in pages(client.pools.ListReplicas, request):
        for replica in page.replicas:
            yield replica


def share(turns_by_how: Mapping[str, int]) -> str:
    """How many turns of all that reached an agent were warm, in per cent."""
    turns = sum(turns_by_how.get(how, 0) for how in HITS)
    return f"{turns_by_how.get('warm', 0) / turns:.0%} of {turns} turns" if turns else "no turns yet"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {name.lower()}" for name, number in sorted(counts.items())) or "none"


def _entry(entry: pool_pb2.Entry, now: datetime) -> tuple[str, ...]:
    state = words.word(pool_pb2.EntryState.Name, entry.state, "ENTRY_STATE_")
    idle = entry.state == pool_pb2.ENTRY_STATE_IDLE
    expires = entry.expires_at.ToDatetime(UTC) if entry.HasField("expires_at") else None
    return (
        words.session(entry.session),
        state,
        entry.agent,
        str(entry.turns),
        words.since(entry.used_at.ToDatetime(UTC), now) if idle else "",
        words.span(max(0.0, (expires - now).total_seconds())) if expires is not None else "",
        entry.sandbox_id,
    )
