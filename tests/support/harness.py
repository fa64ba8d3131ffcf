"""Daemons in front of agents, as tests start them: our agentd, and the real sandbox-agent 0.4.2 from npm.

Both speak the same HTTP dialect. npm packages are installed once into `.hearth-cache/npm` below the repository.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import platform
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import psutil
import pytest

from hearth.embedded import daemons
from tests.support import npm, processes
from tests.support.waiting import ended

ROOT = Path(__file__).resolve().parents[2]
NPM_CACHE = ROOT / ".hearth-cache" / "npm"
NPM_SECONDS = 100
SCRIPTED_AGENT = [sys.executable, "-m", "hearth.agents.scripted"]

# The agents that sandbox-agent 0.4.2 knows and that can be replaced by a launcher of one's own.
SANDBOX_AGENT_KINDS = ("claude", "codex", "opencode", "pi")
_SANDBOX_AGENT_SHA256 = "bab098abef874ade481aa7b50463662814fbf27294399f545307fedb638f029b"
# In the environment of a daemon and all that it starts.
_MEMBER = "HEARTH_TEST_HARNESS"


@dataclass(frozen=True)
class HarnessDaemon:
    """A daemon that serves. `kind` is `agentd` or `sandbox-agent`."""

    kind: str
    url: str
    token: str
    process: subprocess.Popen[bytes]
    home: Path
    log_file: Path

    def log(self) -> str:
        """What it wrote so far."""
        return self.log_file.read_text("utf-8", "replace")


@dataclass(frozen=True)
class Agent:
    """How agentd starts an agent; see its agents file."""

    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None


@asynccontextmanager
async def agentd(
    agents: Mapping[str, Sequence[str] | Agent],
    home: Path,
    *,
    arguments: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
) -> AsyncIterator[HarnessDaemon]:
    """Our daemon with these agents (name → command) and HOME, on a free port. It must leave nothing running."""
    home.mkdir(parents=True, exist_ok=True)
    token = secrets.token_hex(16)
    (home / "token").write_text(token)
    entries = {name: agent if isinstance(agent, Agent) else Agent(agent) for name, agent in agents.items()}
    (home / "agents.json").write_text(
        json.dumps({name: {"command": [*a.command], "env": {**a.env}, "cwd": a.cwd} for name, a in entries.items()})
    )
    port_file = home / "port"
    port_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "services.sandbox.agentd", "--token-file", str(home / "token")]
    command += ["--agents-file", str(home / "agents.json"), "--port-file", str(port_file), *arguments]
    process, log_file, member = _start(command, home, env or {})
    try:
        while not port_file.exists():
            _check_alive(process, log_file)
            await asyncio.sleep(0.005)
        url = f"http://127.0.0.1:{port_file.read_text().strip()}"
        yield HarnessDaemon("agentd", url, token, process, home, log_file)
    finally:
        killed = process.poll() is not None and process.returncode < 0
        _stop(process)
        left = _end_members(member)
    assert killed or not left, f"agentd left running: {left}"


@asynccontextmanager
async def real_sandbox_agent(
    agents: Mapping[str, Sequence[str]], home: Path, *, env: Mapping[str, str] | None = None
) -> AsyncIterator[HarnessDaemon]:
    """The real sandbox-agent 0.4.2 with these agents (name → command), on a free port.

    Skips the test where it cannot be had. What it leaves running when it ends is killed here. It knows its agents by
    name, so a name must be one of SANDBOX_AGENT_KINDS; what runs is the given command.
    """
    binary = sandbox_agent_binary()
    home.mkdir(parents=True, exist_ok=True)
    launchers = home / ".local/share/sandbox-agent/bin"
    (launchers / "agent_processes").mkdir(parents=True, exist_ok=True)
    for name, command in agents.items():
        assert name in SANDBOX_AGENT_KINDS, f"sandbox-agent has no agent {name}, only {SANDBOX_AGENT_KINDS}"
        _write_script(launchers / name, "exit 0")
        _write_script(launchers / "agent_processes" / f"{name}-acp", f"exec {shlex.join(command)}")
    token = secrets.token_hex(16)
    port = daemons.free_port()
    process, log_file, member = _start(
        [str(binary), "server", "--token", token, "--no-telemetry", "--host", "127.0.0.1", "--port", str(port)],
        home,
        {"SANDBOX_AGENT_BIN": str(binary), "SANDBOX_AGENT_ACP_REQUEST_TIMEOUT_MS": "7200000", **(env or {})},
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {token}"}) as session:
            while not await _healthy(session, url):
                _check_alive(process, log_file)
                await asyncio.sleep(0.01)
        yield HarnessDaemon("sandbox-agent", url, token, process, home, log_file)
    finally:
        _stop(process)
        _end_members(member)


def sandbox_agent_binary() -> Path:
    """Path of the real daemon; installed if need be. Skips the test where that is impossible."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        pytest.skip(f"sandbox-agent is tested on linux x86_64 only, this is {sys.platform} {platform.machine()}")
    folder = install_npm("@sandbox-agent/cli-linux-x64", "0.4.2")
    binary = folder / "bin" / "sandbox-agent"
    digest = hashlib.sha256(binary.read_bytes()).hexdigest()
    assert digest == _SANDBOX_AGENT_SHA256, f"{binary} is not the sandbox-agent that was measured: sha256 {digest}"
    binary.chmod(0o755)
    return binary


def example_agent() -> list[str]:
    """Command of the third-party example agent of the ACP SDK for JavaScript; installed if need be.

    Skips the test where that is impossible.
    """
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not installed")
    return [node, str(install_npm("@agentclientprotocol/sdk", "0.16.1") / "dist" / "examples" / "agent.js")]


def install_npm(package: str, version: str) -> Path:
    """Folder of an npm package; installed once.

    Skips the test where that is impossible.
    """
    prefix = NPM_CACHE / f"{package.replace('/', '+')}@{version}"
    try:
        return npm.modules(prefix, [f"{package}@{version}"], seconds=NPM_SECONDS) / package
    except npm.Unavailable as why:
        pytest.skip(str(why))


def _start(command: Sequence[str], home: Path, env: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], Path, str]:
    log_file = home / "daemon.log"
    member = secrets.token_hex(8)
    own = {"HOME": str(home), processes.MARKER: processes.marker(), _MEMBER: member, "PYTHONPATH": str(ROOT)}
    with log_file.open("ab") as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=home,
            env={**os.environ, **own, **env},
            start_new_session=True,
        )
    return process, log_file, member


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise


def _end_members(member: str) -> list[str]:
    """Kill what still runs of a daemon, and say what it was. What was about to end anyway gets a moment."""
    members: dict[int, str] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get(_MEMBER) == member:
                members[process.pid] = " ".join(process.cmdline())
    until = time.monotonic() + 1
    while time.monotonic() < until and not all(ended(pid) for pid in members):
        time.sleep(0.01)
    left = {pid: command for pid, command in members.items() if not ended(pid)}
    for pid in left:
        with suppress(psutil.NoSuchProcess):
            psutil.Process(pid).kill()
    return [f"{pid} {command}" for pid, command in left.items()]


def _check_alive(process: subprocess.Popen[bytes], log_file: Path) -> None:
    assert process.poll() is None, f"the daemon ended with {process.returncode}:\n{log_file.read_text()}"


async def _healthy(session: aiohttp.ClientSession, url: str) -> bool:
    try:
        async with session.get(f"{url}/v1/health") as response:
            return response.status == 200
    except aiohttp.ClientConnectionError:
        return False


def _write_script(path: Path, line: str) -> None:
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
