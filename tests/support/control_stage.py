"""Two replicas of the pool with the services below them, made to be frozen and killed half done, and agents that write
down what reaches them and work for as long as a test wants.

Messages are texts whose first line is their label. A held one lets its agent read a pipe to which nobody has written
yet; one that asks lets it ask for leave to use two tools at the same time.
"""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import asyncpg
import psutil

from hearth.session.v1 import session_pb2 as sessions
from hearth.types.v1 import session_pb2
from services.chassis import crashpoints
from services.pool.sealing import new_key
from tests.contract.pool.house import Backend, House
from tests.support.processes import ServiceProcess
from tests.support.replicas import FAST, replicas_by
from tests.support.servers import Servers
from tests.support.waiting import eventually as until

_T = TypeVar("_T")

AGENT = "logged"
GATES = ("t1", "t2")
# Where agents, and MCP servers of theirs, have the value of a credential.
CREDENTIAL, VARIABLE, HEADER = "model-key", "MODEL_KEY", "X-Model-Key"
FIRST, SECOND = "pool", "pool-2"

_WAITING = """
SELECT pid, client_port, pg_blocking_pids(pid) AS behind,
       query LIKE 'SELECT * FROM pool.session WHERE project = $1 AND session = $2 FOR UPDATE%' AS changes
FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'
"""


def specs() -> dict[str, sessions.SessionSpec]:
    """What a session may be told that it has. CREDENTIAL must be there for those that bind it."""
    key, header = (sessions.CredentialBinding(credential=CREDENTIAL, target=where) for where in (VARIABLE, HEADER))
    notes = sessions.McpHttp(url="http://127.0.0.1:1/notes", headers={"X-Plain": "plain"}, credentials=[header])
    return {
        "defaults": sessions.SessionSpec(),
        "brief": sessions.SessionSpec(instructions="Be brief."),
        "keyed": sessions.SessionSpec(model="large", credentials=[key]),
        "serving": sessions.SessionSpec(mcp_servers=[sessions.McpServer(name="notes", http=notes)]),
    }


class Stage:
    """All services, with an agent that writes down what reaches it, and the pipes that hold its turns."""

    def __init__(self, servers: Servers, env: Mapping[str, str] | None = None) -> None:
        directory = servers.scratch()
        self._pipes = directory / "pipes"
        self._pipes.mkdir()
        self._journal = directory / "agents.jsonl"
        self._held: dict[str, int] = {}
        agent = {
            "command": [sys.executable, "-P", "-m", "hearth.agents.scripted"],
            "env": {"HEARTH_SCRIPTED_LOG": str(self._journal), "HEARTH_SCRIPTED_LOG_VALUES": f"{VARIABLE} {HEADER}"},
        }
        self.house = House(
            directory,
            servers.create_database(migrated=True),
            servers.empty_valkey(),
            {
                "HEARTH_AGENTS": json.dumps({AGENT: agent}),
                "HEARTH_DEFAULT_AGENT": AGENT,
                "HEARTH_DEFAULT_PERMISSION": "ask",
                "HEARTH_SECRET_KEY": new_key(),
                "HEARTH_SHUTDOWN_GRACE": "10",
                **FAST,
                **(env or {}),
            },
            pools=2,
        )
        for name in self.house.pools:
            self.house.processes[name].env[crashpoints.VARIABLE] = f"@{self._plan(name)}"
        self._backends: dict[str, Backend] = {}

    # Calls

    @property
    def backend(self) -> Backend:
        """Calls that go around the replicas."""
        return self.of("")

    def of(self, pool: str) -> Backend:
        """Calls to one replica."""
        if pool not in self._backends:
            self._backends[pool] = Backend(self.house, pool=pool)
        return self._backends[pool]

    async def close(self) -> None:
        """Close what is open."""
        await self.forget_connections()
        for descriptor in self._held.values():
            os.close(descriptor)
        self._held.clear()

    async def forget_connections(self) -> None:
        """Connect anew from now on; one to what has died is tried again only after a while."""
        while self._backends:
            await self._backends.popitem()[1].close()

    # Replicas

    def process(self, pool: str) -> ServiceProcess:
        """The process of a replica."""
        return self.house.processes[pool]

    async def holder_of(self, pool: str) -> str:
        """The id of a replica that is there."""
        found = await replicas_by(self.backend.pools)
        return found[self.process(pool).address].holder

    async def driven_by(self, holder: str) -> set[str]:
        """Sessions with an execution that this replica drives, or that nobody has picked up."""
        rows = await self.ask(
            "SELECT session FROM pool.execution WHERE state <> 'TERMINAL' AND (driver IS NULL OR driver = $1)", holder
        )
        return {row["session"] for row in rows}

    async def given_up(self, holder: str) -> None:
        """Return when the other replica has taken this one for dead."""

        async def gone() -> bool:
            return not await self.ask("SELECT 1 FROM pool.replica WHERE holder = $1", holder)

        await quietly(gone, seconds=60, what=f"nobody gives {holder} up")

    def aim(self, pool: str, point: str, *, how: str = "stop", passage: int = 1) -> Aim:
        """From now on this replica freezes at the point, or dies with `how` = "kill", the n-th time it comes by."""
        found = Aim(self, pool, f"pool.{point}", {"stop": "SIGSTOP", "kill": "SIGKILL"}[how])
        draft = self._plan(pool).with_suffix(".draft")
        draft.write_text(f"pool.{point}@{passage}={how}")
        draft.rename(self._plan(pool))
        return found

    def aim_nowhere(self, pool: str) -> None:
        """Every point of this replica lets pass."""
        self._plan(pool).unlink(missing_ok=True)

    def _plan(self, pool: str) -> Path:
        return self.house.directory / f"plan-{pool}"

    # Rows

    async def ask(self, statement: str, *values: str) -> list[asyncpg.Record]:
        """Rows of the database of the services."""
        connection = await asyncpg.connect(self.house.dsn)
        try:
            return list(await connection.fetch(statement, *values))
        finally:
            await connection.close()

    async def told(self, *, seconds: float) -> None:
        """Return when readers were told everything that was accepted: it is answered before it is in the log."""

        async def so() -> bool:
            return not await self.ask("SELECT 1 FROM pool.outbox WHERE refused IS NULL LIMIT 1")

        await quietly(so, seconds=seconds, what="the outbox of the pool is not empty")

    async def expire(self, session: str) -> None:
        """The time of all questions of a session that wait is over."""
        await self.ask(
            "UPDATE pool.gate SET expires_at = now() - interval '1 second' WHERE session = $1 AND state = 'PENDING'",
            session,
        )

    @asynccontextmanager
    async def barrier(self, session: session_pb2.SessionKey) -> AsyncIterator[Barrier]:
        """Nobody changes a session until the block is left; then those that have arrived do, in their order."""
        connection = await asyncpg.connect(self.house.dsn)
        transaction = connection.transaction()
        await transaction.start()
        try:
            await connection.execute(
                "SELECT 1 FROM pool.session WHERE project = $1 AND session = $2 FOR UPDATE",
                session.project,
                session.session,
            )
            yield Barrier(self, connection.get_server_pid())
        finally:
            await transaction.rollback()
            await connection.close()

    # Messages

    def text(self, label: str, kind: str) -> str:
        """The message with this label: one that is answered at once, is `held`, or `asks`."""
        if kind == "held":
            return f"{label}\nrun read line < {shlex.quote(str(self._pipe(label)))}"
        if kind == "asks":
            return "\n".join([label, *(f"parallel ask {name} {{}}" for name in GATES)])
        return label

    def _pipe(self, label: str) -> Path:
        path = self._pipes / label
        if label not in self._held:
            os.mkfifo(path)
            # Read and write: whoever reads finds somebody who writes, and waits for what is written.
            self._held[label] = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        return path

    def let_go(self, label: str) -> None:
        """The turn of a held message may end, also when it has not begun."""
        os.write(self._held[label], b"go on\n")

    # Evidence

    def journal(self) -> list[dict[str, Any]]:
        """What agents wrote down."""
        if not self._journal.exists():
            return []
        return [json.loads(line) for line in self._journal.read_text("utf-8").splitlines()]

    def prompts_since(self, mark: int) -> set[str]:
        """The executions whose prompts reached an agent since the journal had `mark` lines."""
        return {str(line["message_id"]) for line in self.journal()[mark:] if line["event"] == "prompt"}


class Aim:
    """A point at which a replica is about to freeze or die."""

    def __init__(self, stage: Stage, pool: str, point: str, how: str) -> None:
        self._stage = stage
        self._pool = pool
        self._process = stage.process(pool)
        self._line = f"crash point reached: {point} ({how})"
        self._before = self._process.log().count(self._line)

    async def reached(self) -> None:
        """Return when it is frozen there, or dead."""
        await until(self._is_reached, timeout=45)
        self._stage.aim_nowhere(self._pool)

    def _is_reached(self) -> bool:
        process = self._process
        if process.log().count(self._line) <= self._before:
            assert process.running, f"it ended elsewhere:\n{process.log_tail()}"
            return False
        return not process.running or psutil.Process(process.pid).status() == psutil.STATUS_STOPPED


class Barrier:
    """A row that nobody gets before all have come that a test wants there. `pid`: the backend that holds it."""

    def __init__(self, stage: Stage, pid: int) -> None:
        self._stage = stage
        self._pid = pid

    async def arrives(self, work: Awaitable[_T], *, pool: str) -> asyncio.Future[_T]:
        """Begin something that will change the session at one replica, and return when it waits for its turn."""
        before = await self.waiting(pool)
        task = asyncio.ensure_future(work)
        await self.grows(before, pool=pool)
        return task

    async def grows(self, before: int, *, pool: str = "") -> None:
        """Return when more than `before` transactions wait, of one replica or of all."""

        async def grown() -> bool:
            return await self.waiting(pool) > before

        await quietly(grown, seconds=30, what="what was to wait for the row does not")

    async def waiting(self, pool: str = "") -> int:
        """How many transactions wait to change this session, of one replica or of all."""
        rows = await self._stage.ask(_WAITING)
        reached, found = {self._pid}, list[asyncpg.Record]()
        while more := [row for row in rows if row["pid"] not in reached and reached & set(row["behind"])]:
            reached |= {row["pid"] for row in more}
            found += more
        changing = [row["client_port"] for row in found if row["changes"]]
        if not pool:
            return len(changing)
        process = psutil.Process(self._stage.process(pool).pid)
        own = {connection.laddr.port for connection in process.net_connections("tcp")}
        return sum(port in own for port in changing)


async def quietly(condition: Callable[[], Awaitable[bool]], *, seconds: float, what: str) -> None:
    """Return when a condition holds; AssertionError when it does not within `seconds`."""
    try:
        async with asyncio.timeout(seconds):
            while not await condition():  # noqa: ASYNC110 - there is no event to wait for
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise AssertionError(what) from None
