"""The Postgres and Valkey that tests run against: embedded ones, or those named in the environment.

Started once in a pytest process (a worker of xdist is one), at the first test that needs them. Their directory carries
the pid, so that the next run cleans what a killed one left.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import shutil
import tempfile
from collections.abc import Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit, urlunsplit

import asyncpg
import psutil
import redis

from hearth.embedded.postgres import EmbeddedPostgres
from hearth.embedded.valkey import EmbeddedValkey
from hearth.secret import Secret
from services.chassis.migrations import migrate

_PREFIX = "hearth-tests-"
_VALKEY_DATABASES = 256
# Each is that of the service of its name.
_SCHEMAS = ("history", "pool", "sandbox")

_T = TypeVar("_T")


class Servers:
    """The servers of one pytest process, and the directory below which its tests work."""

    def __init__(self, *, postgres_dsn: str = "", valkey_url: str = "") -> None:
        """A DSN or URL given here is used instead of an embedded server; its user must be able to make databases."""
        _clean_up_after_the_dead()
        # The embedded Postgres may run as another user, who has to get through to its directory.
        self.directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-"))
        self.directory.chmod(0o755)
        self._postgres_dsn = postgres_dsn
        self._valkey_url = valkey_url
        self._postgres = EmbeddedPostgres(self.directory / "postgres")
        self._valkey = EmbeddedValkey(self.directory / "valkey")
        self._numbers = itertools.count(1)
        self._template = ""

    def scratch(self) -> Path:
        """A new empty directory, gone with the session at the latest."""
        path = self.directory / f"scratch-{next(self._numbers)}"
        path.mkdir(mode=0o755)
        return path

    def create_database(self, *, migrated: bool = False) -> str:
        """A fresh database; its DSN. A `migrated` one has the schemas of all services, which then start sooner."""
        admin = self._admin_dsn()
        if migrated and not self._template:
            self._template = self._migrated()
        name = f"hearth_test_{os.getpid()}_{next(self._numbers)}"
        template = urlsplit(self._template).path[1:] if migrated else "template1"
        apart(_execute(admin, f'CREATE DATABASE "{name}" TEMPLATE "{template}"'))
        return with_database(admin, name)

    def drop_database(self, dsn: str) -> None:
        """Drop a database of `create_database`, whoever is still connected to it."""
        name = urlsplit(dsn).path.removeprefix("/")
        apart(_execute(self._admin_dsn(), f'DROP DATABASE IF EXISTS "{name}" WITH (FORCE)'))

    def empty_valkey(self) -> str:
        """The URL of an empty database of the Valkey. Pub/sub channels are shared by all of its databases."""
        base = self._valkey_url or self._started_valkey()
        url = urlunsplit(urlsplit(base)._replace(path=f"/{next(self._numbers) % _VALKEY_DATABASES}"))
        if self._valkey_url:
            url = base
        with redis.Redis.from_url(url) as client:
            client.flushdb()
        return url

    def close(self) -> None:
        """Stop what was started and remove the directory."""
        if self._template:
            self.drop_database(self._template)
        self._postgres.remove()
        self._valkey.remove()
        shutil.rmtree(self.directory)

    def _migrated(self) -> str:
        dsn = self.create_database()
        for schema in _SCHEMAS:
            apart(migrate(Secret(dsn), schema, f"services.{schema}"))
        return dsn

    def _admin_dsn(self) -> str:
        if not self._postgres_dsn:
            self._postgres_dsn = self._postgres.start_detached().url
        return self._postgres_dsn

    def _started_valkey(self) -> str:
        found = self._valkey.find() or self._valkey.start_detached()
        return found.url


def with_database(dsn: str, name: str) -> str:
    """`dsn` with another database."""
    return urlunsplit(urlsplit(dsn)._replace(path=f"/{name}"))


def apart(work: Coroutine[Any, Any, _T]) -> _T:
    """Run `work` in an event loop of another thread: fixtures are called with and without a loop that runs."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


async def _execute(dsn: str, statement: str) -> None:
    connection = await asyncpg.connect(dsn)
    try:
        await connection.execute(statement)
    finally:
        await connection.close()


def _clean_up_after_the_dead() -> None:
    for directory in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        pid = directory.name.removeprefix(_PREFIX).split("-", 1)[0]
        if pid.isdigit() and not psutil.pid_exists(int(pid)) and os.access(directory, os.W_OK):
            # Other workers begin at the same time, and see the same directories.
            with contextlib.suppress(FileNotFoundError):
                EmbeddedPostgres(directory / "postgres").remove()
                EmbeddedValkey(directory / "valkey").remove()
            shutil.rmtree(directory, ignore_errors=True)
