"""Postgres: the pool, what a start checks, and the named SQL of a service. Migrations are in `migrations`."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import asyncpg
import asyncpg.pool
from opentelemetry import trace
from opentelemetry.semconv.attributes.db_attributes import DB_QUERY_SUMMARY, DB_RESPONSE_STATUS_CODE, DB_SYSTEM_NAME

from hearth.secret import Secret
from services.chassis import telemetry
from services.chassis.errors import Unavailable, dependency_unavailable
from services.chassis.settings import EXIT_USAGE, PostgresSettings, StartupError

logger = logging.getLogger(__name__)

# A committed row must survive the crash of every process: these session settings would let Postgres acknowledge less.
_WEAK_COMMITS = frozenset({"off", "local", "remote_write"})
_RETRY_SECONDS = 0.5
_CLOSE_SECONDS = 3.0
_NAME = re.compile(r"^--\s*name:\s*(\w+)\s*$")

# What asyncpg raises while Postgres is not there yet, is starting or stopping, or lacks what a connection takes.
CONNECT_ERRORS: tuple[type[Exception], ...] = (
    OSError,
    TimeoutError,
    asyncpg.PostgresConnectionError,
    asyncpg.OperatorInterventionError,
    asyncpg.InsufficientResourcesError,
    asyncpg.InterfaceError,
)

# asyncpg's classes are generic for the type checker only.
if TYPE_CHECKING:
    _BaseConnection = asyncpg.Connection[asyncpg.Record]
    _Pool = asyncpg.Pool[asyncpg.Record]
    _PoolAcquireContext = asyncpg.pool.PoolAcquireContext[asyncpg.Record]
else:
    _BaseConnection = asyncpg.Connection
    _Pool = asyncpg.Pool
    _PoolAcquireContext = asyncpg.pool.PoolAcquireContext

# What `async with pool.acquire() as connection` gives.
Connection: TypeAlias = "asyncpg.pool.PoolConnectionProxy[asyncpg.Record]"


class _Connection(_BaseConnection):
    """Given back without a reset query: that is a round trip for each use, and our sessions keep no state.

    Each statement has a span, within work that has one. OpenTelemetry's own instrumentation does that too, at several
    times the cost, and names a statement by its first word.
    """

    def get_reset_query(self) -> str:
        return ""

    async def execute(self, query: str, *args: Any, **options: Any) -> str:
        with _spanned(query):
            return await super().execute(query, *args, **options)

    async def executemany(self, command: str, args: Any, **options: Any) -> None:
        with _spanned(command):
            await super().executemany(command, args, **options)

    async def fetch(self, query: str, *args: Any, **options: Any) -> Any:
        with _spanned(query):
            return await super().fetch(query, *args, **options)

    async def fetchval(self, query: str, *args: Any, **options: Any) -> Any:
        with _spanned(query):
            return await super().fetchval(query, *args, **options)

    async def fetchrow(self, query: str, *args: Any, **options: Any) -> Any:
        with _spanned(query):
            return await super().fetchrow(query, *args, **options)


# Names of the statements in our files, by their texts.
_names: dict[str, str] = {}


class _spanned:
    """The span of a statement around the block, if it is part of something that has one. No generator, which would cost
    as much as the span itself."""

    __slots__ = ("_query", "_span")

    def __init__(self, query: str) -> None:
        self._query = query
        self._span: trace.Span | None = None

    def __enter__(self) -> None:
        if not trace.get_current_span().is_recording():
            return
        # The name says which statement it is, and never what was put into it.
        name = _names.get(self._query) or self._query.lstrip().partition(" ")[0].rstrip(";")
        attributes = {DB_SYSTEM_NAME: "postgresql", DB_QUERY_SUMMARY: name}
        self._span = telemetry.tracer().start_span(name, kind=trace.SpanKind.CLIENT, attributes=attributes)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        span = self._span
        if span is None:
            return
        if error is not None:
            state = getattr(error, "sqlstate", None)
            if state:
                span.set_attribute(DB_RESPONSE_STATUS_CODE, state)
            telemetry.mark_failed(span, state or type(error).__name__)
        span.end()


class Pool(_Pool):
    """asyncpg's pool, with a bound on the wait for a connection and no reuse of a connection left in mid-command.

    The state of a session is not reset between uses (an open transaction is): use `SET LOCAL` and transaction-level
    advisory locks. What needs a session of its own, such as LISTEN, opens a connection of its own.
    """

    def __init__(self, *args: Any, acquire_timeout: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._acquire_timeout = acquire_timeout

    def acquire(self, *, timeout: float | None = None) -> _Acquired:
        """A connection, for `async with`. Raises `Unavailable` when none gets free within `timeout` seconds, and when
        Postgres cannot be reached or takes none.
        """
        return _Acquired(self, self._acquire_timeout if timeout is None else timeout)

    async def __aexit__(self, *exc: Any) -> None:
        """Close, but do not wait for ever for a connection that somebody forgot to give back."""
        try:
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self.close()
        except TimeoutError:
            logger.warning("connections are still in use, dropped")
            self.terminate()

    async def ping(self) -> None:
        """Return when Postgres answers a query; for health checks."""
        async with self.acquire() as connection:
            await connection.fetchval("SELECT 1")


class _Acquired(_PoolAcquireContext):
    async def __aenter__(self) -> Connection:
        try:
            return await super().__aenter__()
        except TimeoutError:
            raise _no_connection() from None
        except OSError as error:
            # Here it can only be a failed connect, whatever it is: a name that does not resolve, a host without a
            # route, several addresses of which none answers, a socket that is gone.
            logger.warning("Postgres cannot be reached", extra={"cause": f"{type(error).__name__}: {error}"})
            raise dependency_unavailable("Postgres") from error
        except asyncpg.PostgresError as error:
            # Whatever it says, it refuses a connection, not a statement: a start-up, a failover, a changed password.
            logger.warning("Postgres refuses a connection", extra={"sqlstate": error.sqlstate})
            raise dependency_unavailable("Postgres", "refuses connections") from error

    async def __aexit__(self, *exc: Any) -> None:
        # A cancelled or timed-out command may still run at the server. Its cancel request could hit whatever the next
        # user of the connection sends, so the connection goes.
        if self.connection and exc and isinstance(exc[1], asyncio.CancelledError | TimeoutError):
            # One that broke meanwhile is the pool's again, which says so by an error that must not replace this one.
            with suppress(asyncpg.InterfaceError):
                self.connection.terminate()
        await super().__aexit__(*exc)


def _no_connection() -> Unavailable:
    return dependency_unavailable("Postgres", "has no free connection")


async def create_pool(
    settings: PostgresSettings,
    name: str,
    *,
    size: int | None = None,
    server_settings: Mapping[str, str] | None = None,
) -> Pool:
    """A pool for the service `name`, its first connection open and checked; close it with `async with pool:`.

    `server_settings` are further session defaults of its connections, as planner switches.

    Waits up to `postgres_start_timeout` for Postgres to answer. Raises `StartupError` when it does not, and when it is
    set to lose commits (`fsync` off, `synchronous_commit` below on).
    """
    pool = Pool(
        settings.postgres_dsn.reveal(),
        acquire_timeout=settings.postgres_acquire_timeout,
        min_size=1,
        max_size=size or settings.postgres_pool_size,
        max_queries=50_000,
        max_inactive_connection_lifetime=300.0,
        setup=None,
        init=None,
        connect=None,
        reset=None,
        loop=None,
        connection_class=_Connection,
        record_class=asyncpg.Record,
        timeout=settings.postgres_connect_timeout,
        # The server ends a statement first; this ends the wait for a server that does not answer at all.
        command_timeout=settings.postgres_statement_timeout + settings.postgres_connect_timeout,
        server_settings={
            "application_name": f"hearth-{name}",
            "statement_timeout": _milliseconds(settings.postgres_statement_timeout),
            "lock_timeout": _milliseconds(settings.postgres_lock_timeout),
            # A process that dies between two statements must not hold its locks until TCP notices.
            "idle_in_transaction_session_timeout": _milliseconds(settings.postgres_statement_timeout * 2),
            **(server_settings or {}),
        },
    )
    await wait_for_postgres(settings.postgres_dsn, settings.postgres_start_timeout)
    try:
        await pool
    except CONNECT_ERRORS as error:
        raise _unreachable(error) from None
    try:
        await _check_durability(pool)
    except BaseException:
        pool.terminate()
        raise
    return pool


async def wait_for_postgres(dsn: Secret, timeout: float) -> None:
    """Return when `dsn` takes connections; raises `StartupError` after `timeout` seconds without one."""
    ends = time.monotonic() + timeout
    while True:
        try:
            connection = await asyncpg.connect(dsn.reveal(), timeout=max(1.0, min(5.0, timeout)))
        except CONNECT_ERRORS as error:
            if time.monotonic() >= ends:
                raise _unreachable(error) from None
            logger.info("waiting for Postgres", extra={"cause": type(error).__name__})
            await asyncio.sleep(_RETRY_SECONDS)
        except (asyncpg.InvalidAuthorizationSpecificationError, asyncpg.InvalidCatalogNameError) as error:
            raise StartupError(f"HEARTH_POSTGRES_DSN is wrong: {error}", exit_code=EXIT_USAGE) from None
        else:
            await connection.close()
            return


def _unreachable(error: Exception) -> StartupError:
    return StartupError(f"Postgres at HEARTH_POSTGRES_DSN does not answer: {type(error).__name__}: {error}")


async def _check_durability(pool: Pool) -> None:
    async with pool.acquire() as connection:
        fsync = await connection.fetchval("SHOW fsync")
        commit = await connection.fetchval("SHOW synchronous_commit")
    if fsync != "on":
        raise StartupError(
            "Postgres runs with fsync=off: a crash loses committed data. Set fsync=on.", exit_code=EXIT_USAGE
        )
    if commit in _WEAK_COMMITS:
        raise StartupError(
            f"Postgres runs with synchronous_commit={commit}: it would acknowledge what a crash loses."
            " Set it to on or remote_apply.",
            exit_code=EXIT_USAGE,
        )


def _milliseconds(seconds: float) -> str:
    return str(round(seconds * 1000))


class Queries:
    """The SQL of a service by name: `queries.lock_session` is the text under `-- name: lock_session`."""

    def __init__(self, text: str, source: str) -> None:
        """Split `text` at its `-- name:` lines; `source` names it in errors. Raises ValueError when it is malformed."""
        self._source = source
        self._found: dict[str, str] = {}
        name, lines = "", list[str]()
        for line in [*text.splitlines(), "-- name: end_of_file"]:
            header = _NAME.match(line)
            if header is None:
                lines.append(line)
                continue
            body = "\n".join(lines).strip()
            if name:
                self._add(name, body)
            name, lines = header.group(1), []

    @classmethod
    def load(cls, package: str, file: str = "queries.sql") -> Self:
        """Read `file` of `package`, for example `Queries.load("services.history")`."""
        return cls(files(package).joinpath(file).read_text("utf-8"), f"{package}/{file}")

    @property
    def names(self) -> frozenset[str]:
        """All names of the file."""
        return frozenset(self._found)

    def _add(self, name: str, body: str) -> None:
        if not body:
            raise ValueError(f"{self._source}: query {name} is empty")
        if name in self._found:
            raise ValueError(f"{self._source}: query {name} is defined twice")
        self._found[name] = body
        _names[body] = name

    def __getattr__(self, name: str) -> str:
        with suppress(KeyError):
            return self._found[name]
        raise AttributeError(f"{self._source} has no query named {name}")
