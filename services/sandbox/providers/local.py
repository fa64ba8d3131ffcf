"""Sandboxes on this machine: a directory and processes. **This isolates nothing.**

An agent in a local sandbox runs as the user of the service. It can read and write whatever that user can, reach the
network, and see other sandboxes. Use it for development, for tests, and for agents that you would run by hand.

Below the root:

    <name>/state.json       labels, creation time, whether it is stopped, the daemon's process and port
    <name>/token            token of the daemon, readable by this user only
    <name>/agents.json      what the daemon may run
    <name>/*.log            what daemon and agents wrote to stderr
    workspaces/<project>/<session>         where the agent works; outlives the sandbox
    workspaces/<project>/<session>/.home   its HOME, so that what an agent remembers survives too, but for its logins

The processes belong to nobody: they live on when the service dies, and the next one finds them by the state files and
by the marker in their environment.
"""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from uuid import uuid4

from hearth.secret import Secret, revealed
from services.chassis.clock import Clock
from services.sandbox.compatibility import Spec
from services.sandbox.providers.files import (
    TRASH,
    path_part,
    remove_below,
    remove_old_trash,
    remove_tree,
    tail,
    write_private,
)
from services.sandbox.providers.local_state import State, StateUnreadable
from services.sandbox.providers.port import (
    Address,
    CreateRequest,
    DaemonFailed,
    DaemonRequest,
    Instance,
    InstanceNotFound,
    InstanceState,
    NameTaken,
    ProviderError,
    ProviderRefused,
    ProviderUnavailable,
)
from services.sandbox.providers.processes import MARKER, alive, end, identify, members
from services.sandbox.rows import NAME_PREFIX, Key

logger = logging.getLogger(__name__)

_P = ParamSpec("_P")
_T = TypeVar("_T")

NAME = "local"
HOST = "127.0.0.1"
_EVERYWHERE = frozenset({"0.0.0.0", "::"})  # noqa: S104 - what an address is compared with

# What an agent inherits of the service's own environment. Not the rest: it holds the database and the tokens.
_INHERITED = (
    *("PATH", "LANG", "LANGUAGE", "LC_ALL", "LC_CTYPE", "TZ", "TMPDIR", "USER", "LOGNAME", "SHELL", "SSL_CERT_FILE"),
    *("SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "NODE_EXTRA_CA_CERTS", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"),
    *("http_proxy", "https_proxy", "no_proxy"),
    # By this a stack of `hearth up` finds what it left behind.
    "HEARTH_STACK_ROOT",
)
_GRACE_SECONDS = 1.5
_POLL_SECONDS = 0.01


def _told(method: Callable[_P, Coroutine[Any, Any, _T]]) -> Callable[_P, Coroutine[Any, Any, _T]]:
    """What the machine refuses (disk full, no right) is a failure of the provider, told as such."""

    @functools.wraps(method)
    async def told(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return await method(*args, **kwargs)
        except OSError as error:
            raise ProviderError(f"{type(error).__name__}: {error}") from error

    return told


# Safe path: a module of the workspace must not stand in for one of ours.
AGENTD = (sys.executable, "-P", "-m", "services.sandbox.agentd")


class LocalProvider:
    """Sandboxes below `root`. They inherit the usual variables of this process, and those named by `inherit`.

    `daemon` is the program that serves a sandbox: it takes the flags of agentd and speaks its dialect. It listens on
    `host`; one that stands for all addresses of this machine is reached by the machine's name.
    """

    def __init__(
        self,
        root: Path,
        clock: Clock,
        *,
        inherit: Sequence[str] = (),
        daemon: Sequence[str] = AGENTD,
        host: str = HOST,
    ) -> None:
        self._root = root.absolute()
        self._workspaces = self._root / "workspaces"
        self._clock = clock
        self._daemon = tuple(daemon)
        self._host = host
        self._inherited = {name: os.environ[name] for name in (*_INHERITED, *inherit) if name in os.environ}
        # Daemons that this process started; it must reap those that end, else they stay as zombies.
        self._started: list[subprocess.Popen[bytes]] = []
        self._workspaces.mkdir(mode=0o700, parents=True, exist_ok=True)
        remove_old_trash(self._root)

    @property
    def name(self) -> str:
        return NAME

    @property
    def sets_network(self) -> bool:
        return False

    def baked(self, spec: Spec) -> Mapping[str, str]:
        return {}

    def check(self, spec: Spec) -> None:
        if spec.snapshot or spec.image:
            raise ProviderRefused(
                "the local provider runs on this machine as it is, not from a snapshot or image",
                field="snapshot" if spec.snapshot else "image",
            )
        if spec.target:
            raise ProviderRefused("the local provider has no targets", field="target")
        if spec.cpus or spec.memory_mib or spec.disk_mib:
            raise ProviderRefused("the local provider cannot limit resources", field="resources")
        if spec.network not in ("", "OPEN"):
            raise ProviderRefused("the local provider cannot restrict the network", field="network")

    def workspace(self, key: Key) -> str:
        return str(self._workspace(key))

    @_told
    async def create(self, request: CreateRequest) -> Instance:
        directory = self._directory(request.name)
        self._make_workspace(request.key)
        state = State(dict(request.labels), *request.key, created=time.time())
        draft = self._root / f"{TRASH}{uuid4().hex}"
        draft.mkdir(mode=0o700)
        try:
            state.write(draft)
            # A directory replaces an empty one only, so of two creates of one name exactly one succeeds.
            draft.rename(directory)
        except OSError:
            remove_tree(draft)
            if directory.exists():
                raise NameTaken(f"{request.name} exists") from None
            raise
        return _instance(directory, state, InstanceState.RUNNING)

    @_told
    async def get(self, reference: str) -> Instance:
        directory = self._directory(reference)
        try:
            state = self._read(reference)
        except InstanceNotFound:
            if not await asyncio.to_thread(members, _sandbox_id(reference)):
                raise
            return _broken(directory, "its directory was removed")
        except StateUnreadable as trouble:
            return _broken(directory, str(trouble))
        return _instance(directory, state, await self._state_of(reference, state))

    @_told
    async def list(self, labels: Mapping[str, str]) -> Sequence[Instance]:
        self._reap()
        found = []
        for directory in sorted(self._root.glob(f"{NAME_PREFIX}*")):
            try:
                state = self._read(directory.name)
            except InstanceNotFound:  # deleted since the listing
                continue
            except (StateUnreadable, OSError) as trouble:
                # Nobody knows whose it is; who has a row of it asks for it by its name.
                logger.warning("sandbox is not listed", extra={"instance": directory.name, "error": str(trouble)})
                continue
            if labels.items() <= state.labels.items():
                found.append(_instance(directory, state, await self._state_of(directory.name, state)))
        return found

    @_told
    async def start(self, reference: str) -> None:
        state = self._read(reference)
        if state.stopped:
            replace(state, stopped=False).write(self._directory(reference))

    @_told
    async def stop(self, reference: str) -> None:
        state = self._read(reference)
        await self._end(reference, state, grace=_GRACE_SECONDS)
        replace(state, stopped=True, daemon_pid=0, daemon_started="", port=0).write(self._directory(reference))

    @_told
    async def delete(self, reference: str) -> None:
        try:
            state = self._read(reference)
        except InstanceNotFound:
            # Whoever removed the directory by hand has ended no process.
            await end(_sandbox_id(reference), None, grace=0.0, clock=self._clock)
            return
        except StateUnreadable:
            # Where its logins lie is not known; the next daemon in its workspace removes them.
            await end(_sandbox_id(reference), None, grace=0.0, clock=self._clock)
        else:
            await end(_sandbox_id(reference), state.daemon, grace=0.0, clock=self._clock)
            self._clean_up(state)
        directory = self._directory(reference)
        trash = directory.with_name(f"{TRASH}{uuid4().hex}")
        with suppress(FileNotFoundError):
            directory.rename(trash)
            # Somebody who did not know of this may have started a daemon since; without a directory nobody can.
            await end(_sandbox_id(reference), None, grace=0.0, clock=self._clock)
            await asyncio.to_thread(remove_tree, trash)

    async def refresh_activity(self, reference: str) -> None:
        """Nothing: no timer stops a local sandbox."""

    @_told
    async def restart_daemon(self, reference: str, daemon: DaemonRequest) -> Address:
        state = self._read(reference)
        if state.stopped:
            raise ProviderUnavailable(f"{reference} is stopped")
        directory = self._directory(reference)
        # From here on the daemon to be is this one; whoever began before and is late sees that by the token.
        write_private(directory / "token", daemon.token.reveal() + "\n")
        await self._end(reference, state, grace=_GRACE_SECONDS)
        self._still(directory, daemon.token.reveal())
        port_file = directory / "port"
        port_file.unlink(missing_ok=True)
        workspace = self._make_workspace(daemon.key)
        agents = {
            name: {"command": list(agent.command), "env": revealed(daemon.variables_of(agent)), "cwd": str(workspace)}
            for name, agent in daemon.agents.items()
        }
        write_private(directory / "agents.json", json.dumps(agents))
        logins = sorted({path for agent in daemon.agents.values() for path in agent.auth_paths})
        remove_below(workspace / ".home", logins)
        state = replace(state, logins=logins)
        process = self._spawn(directory, self._environment(reference, workspace, daemon.secrets))
        try:
            self._still(directory, daemon.token.reveal())
        except ProviderError:
            process.kill()
            raise
        found = identify(process.pid)
        if found is not None:
            state = replace(state, daemon_pid=found.pid, daemon_started=found.started, port=0)
            state.write(directory)
        port = await self._bound_port(process, port_file, directory / "daemon.log")
        replace(state, port=port).write(directory)
        return self._address(port)

    @_told
    async def endpoint(self, reference: str) -> Address:
        state = self._read(reference)
        if not state.port:
            raise ProviderUnavailable(f"{reference} has no daemon")
        return self._address(state.port)

    async def set_network(self, reference: str, mode: str, allow: Sequence[str]) -> None:
        if mode not in ("", "OPEN"):
            raise ProviderRefused("the local provider cannot restrict the network", field="network")

    @_told
    async def delete_workspace(self, key: Key) -> None:
        workspace = self._workspace(key)
        trash = self._root / f"{TRASH}{uuid4().hex}"
        with suppress(FileNotFoundError):
            workspace.rename(trash)
            await asyncio.to_thread(remove_tree, trash)
        with suppress(OSError):  # other sessions of the project
            workspace.parent.rmdir()

    async def close(self) -> None:
        self._reap()
        for process in self._started:
            # It goes on without us; the object would otherwise complain that it was left running.
            process.returncode = 0
        self._started.clear()

    async def _state_of(self, reference: str, state: State) -> InstanceState:
        if state.stopped:
            return InstanceState.STOPPED
        if state.daemon is None or alive(state.daemon):
            return InstanceState.RUNNING
        # The daemon ended by itself (the machine may have been restarted). What it had started may live on.
        left = await asyncio.to_thread(members, _sandbox_id(reference))
        return InstanceState.RUNNING if left else InstanceState.STOPPED

    async def _end(self, reference: str, state: State, *, grace: float) -> None:
        """End what runs there, unless somebody begins to start another daemon meanwhile."""
        directory = self._directory(reference)
        token = self._token(directory)
        await end(
            _sandbox_id(reference),
            state.daemon,
            grace=grace,
            clock=self._clock,
            before_kill=lambda: self._still(directory, token),
        )
        self._clean_up(state)

    def _clean_up(self, state: State) -> None:
        """After its daemon has ended."""
        self._reap()
        remove_below(self._workspace(Key(state.project, state.session)) / ".home", state.logins)

    def _token(self, directory: Path) -> str:
        """Of the daemon that runs, or is being started; empty before the first one."""
        try:
            return (directory / "token").read_text().strip()
        except FileNotFoundError:
            return ""

    def _still(self, directory: Path, token: str) -> None:
        """Raise unless `token` is the last one: a process that was frozen must not kill what came after it."""
        if self._token(directory) != token:
            raise ProviderError(f"another daemon was started in {directory.name} meanwhile")

    def _spawn(self, directory: Path, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        self._reap()
        with (directory / "daemon.log").open("wb") as log:
            process = subprocess.Popen(
                [
                    *(*self._daemon, "--host", self._host, "--port", "0"),
                    *("--token-file", str(directory / "token"), "--agents-file", str(directory / "agents.json")),
                    *("--port-file", str(directory / "port"), "--log-dir", str(directory)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=dict(environment),
                cwd=directory,
                start_new_session=True,
            )
        self._started.append(process)
        return process

    async def _bound_port(self, process: subprocess.Popen[bytes], port_file: Path, log: Path) -> int:
        while True:
            with suppress(FileNotFoundError):
                return int(port_file.read_text())
            if process.poll() is not None:
                raise DaemonFailed(f"the daemon ended with {process.returncode}: {tail(log)}")
            await self._clock.sleep(_POLL_SECONDS)

    def _environment(self, reference: str, workspace: Path, secrets: Mapping[str, Secret]) -> dict[str, str]:
        # Secrets go this way, not through the agents file: agents inherit them from the daemon, no disk sees them.
        return {
            **self._inherited,
            **revealed(secrets),
            "HOME": str(workspace / ".home"),
            MARKER: _sandbox_id(reference),
        }

    def _reap(self) -> None:
        self._started = [process for process in self._started if process.poll() is None]

    def _directory(self, reference: str) -> Path:
        """A provider id is the path itself: what another root holds is found as long as it is there."""
        directory = self._root / reference
        if not directory.name.startswith(NAME_PREFIX):
            raise InstanceNotFound(f"{reference} is no sandbox")
        return directory

    def _read(self, reference: str) -> State:
        directory = self._directory(reference)
        state = State.read(directory)
        if state is None:
            raise InstanceNotFound(f"there is no sandbox in {directory}")
        return state

    def _address(self, port: int) -> Address:
        host = socket.gethostname() if self._host in _EVERYWHERE else self._host
        return Address(f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}")

    def _workspace(self, key: Key) -> Path:
        return self._workspaces / path_part(key.project) / path_part(key.session)

    def _make_workspace(self, key: Key) -> Path:
        workspace = self._workspace(key)
        (workspace / ".home").mkdir(mode=0o700, parents=True, exist_ok=True)
        return workspace


def _instance(directory: Path, state: State, shown: InstanceState) -> Instance:
    age = max(0.0, time.time() - state.created)
    return Instance(str(directory), directory.name, shown, state.labels, age)


def _broken(directory: Path, detail: str) -> Instance:
    return Instance(str(directory), directory.name, InstanceState.ERROR, {}, 0.0, detail)


def _sandbox_id(reference: str) -> str:
    return Path(reference).name.removeprefix(NAME_PREFIX)
