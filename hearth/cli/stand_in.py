"""Daytona for the demo: the real API where one is named, else a stand-in of it that a clone of the repository has.

The stand-in is a program of the tests, `python -m tests.support.daytona`; its sandboxes are processes on this machine.
The services that use it are the ones that use the real API, with the real SDK.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from hearth.embedded import daemons

START_SECONDS = 30.0
STOP_SECONDS = 15.0
NPM_SECONDS = 100.0
NPM_PACKAGE = "@sandbox-agent/cli-linux-x64"
NPM_VERSION = "0.4.2"
# The real daemon knows its agents by name. Behind one of its names runs the agent of the demo.
REAL_AGENT = "claude"
SCRIPTED = [sys.executable, "-P", "-m", "hearth.agents.scripted"]
AGENTD = [
    *(sys.executable, "-P", "-m", "services.sandbox.agentd", "--host", "{host}", "--port", "{port}"),
    *("--agents-file", "{agents}", "--log-dir", "{logs}"),
]


class Unusable(Exception):
    """There is no Daytona for the demo; the message says what to do."""


@contextlib.asynccontextmanager
async def daytona(root: Path, url: str, daemon: str, say: Callable[[str], None]) -> AsyncIterator[Mapping[str, str]]:
    """Settings of services that use Daytona, for as long as the context lasts.

    `url` is an API whose key is in HEARTH_DAYTONA_API_KEY or DAYTONA_API_KEY; empty starts a stand-in below `root`, in
    whose sandboxes `daemon` runs: `agentd`, `sandbox-agent`, or a path of the latter. Raises `Unusable`.
    """
    if importlib.util.find_spec("daytona") is None:
        raise Unusable("the Daytona SDK is not installed: pip install 'hearth[daytona]'")
    shared = {"HEARTH_PROVIDERS": "daytona", "HEARTH_DEFAULT_PROVIDER": "daytona"}
    if url:
        yield {**shared, "HEARTH_DAYTONA_API_URL": url, "HEARTH_DAYTONA_API_KEY": api_key()}
        return
    repository = clone()
    chosen = await asyncio.to_thread(_daemon, root, daemon, say)
    say("starting a stand-in of Daytona")
    async with _running(root, repository) as (address, key):
        yield {
            **shared,
            "HEARTH_DAYTONA_API_URL": address,
            "HEARTH_DAYTONA_API_KEY": key,
            # Absolute paths in its sandboxes are paths of this machine.
            "HEARTH_DAYTONA_MOUNT": str(root / "mounts"),
            **chosen,
        }


def api_key() -> str:
    """The key of the account, from the environment. Raises `Unusable`."""
    key = os.environ.get("HEARTH_DAYTONA_API_KEY") or os.environ.get("DAYTONA_API_KEY", "")
    if not key:
        raise Unusable("no API key: set HEARTH_DAYTONA_API_KEY")
    return key


def clone(package: Path = Path(__file__)) -> Path:
    """The clone of the repository that this program runs from. Raises `Unusable`."""
    root = package.resolve().parents[2]
    if not (root / "tests" / "support" / "daytona" / "__main__.py").is_file():
        raise Unusable(
            "the stand-in of Daytona is not in the installed package; run the demo from a clone of the repository, or"
            " give --daytona-url and HEARTH_DAYTONA_API_KEY"
        )
    return root


def _daemon(root: Path, daemon: str, say: Callable[[str], None]) -> dict[str, str]:
    """Settings that make a daemon run in the sandboxes, with the scripted agent behind it."""
    if daemon == "agentd":
        return {"HEARTH_DAYTONA_DAEMON": json.dumps(AGENTD)}
    binary = _sandbox_agent(root, say) if daemon == "sandbox-agent" else Path(daemon)
    if not os.access(binary, os.X_OK):
        raise Unusable(f"{binary} is no program")
    return {
        "HEARTH_DAYTONA_DAEMON": json.dumps([str(_launcher(root, binary)), *_SERVER]),
        "HEARTH_AGENTS": json.dumps({REAL_AGENT: {"command": SCRIPTED}}),
        "HEARTH_DEFAULT_AGENT": REAL_AGENT,
    }


_SERVER = ("server", "--no-telemetry", "--token", "{token}", "--host", "{host}", "--port", "{port}")


def _launcher(root: Path, binary: Path) -> Path:
    """A program that puts the scripted agent where sandbox-agent looks for an agent, then becomes sandbox-agent."""
    path = root / "sandbox-agent"
    agent, daemon = shlex.quote(shlex.join(SCRIPTED)), shlex.quote(str(binary))
    path.write_text(
        "#!/bin/sh\n"
        'bin="${XDG_DATA_HOME:-$HOME/.local/share}/sandbox-agent/bin"\n'
        'mkdir -p "$bin/agent_processes"\n'
        f"printf '#!/bin/sh\\nexit 0\\n' >\"$bin/{REAL_AGENT}\"\n"
        f"printf '#!/bin/sh\\nexec %s\\n' {agent} >\"$bin/agent_processes/{REAL_AGENT}-acp\"\n"
        f'chmod +x "$bin/{REAL_AGENT}" "$bin/agent_processes/{REAL_AGENT}-acp"\n'
        f"export SANDBOX_AGENT_BIN={daemon}\n"
        f'exec {daemon} "$@"\n'
    )
    path.chmod(0o755)
    return path


def _sandbox_agent(root: Path, say: Callable[[str], None]) -> Path:
    """The real daemon: of this machine, else of the clone's cache, else from npm. Raises `Unusable`."""
    found = shutil.which("sandbox-agent")
    if found is not None:
        return Path(found)
    inside = Path("node_modules") / NPM_PACKAGE / "bin" / "sandbox-agent"
    cached = clone() / ".hearth-cache" / "npm" / f"{NPM_PACKAGE.replace('/', '+')}@{NPM_VERSION}"
    if (cached / ".installed").exists():
        binary = cached / inside
    else:
        npm = shutil.which("npm")
        if npm is None:
            raise Unusable("sandbox-agent is not in PATH and npm, which has it, is not installed")
        say(f"getting {NPM_PACKAGE} {NPM_VERSION} from npm")
        where = root / "npm"
        _install(npm, where)
        binary = where / inside
    # npm leaves out the mark when it runs no scripts.
    binary.chmod(0o755)
    return binary


def _install(npm: str, where: Path) -> None:
    where.mkdir(parents=True)
    options = ("--no-save", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(where))
    try:
        subprocess.run(
            [npm, "install", *options, f"{NPM_PACKAGE}@{NPM_VERSION}"],
            check=True,
            capture_output=True,
            text=True,
            timeout=NPM_SECONDS,
        )
    except subprocess.CalledProcessError as error:
        raise Unusable(f"npm did not install sandbox-agent: {error.stderr.strip()}") from None
    except subprocess.TimeoutExpired:
        raise Unusable(f"npm did not install sandbox-agent within {NPM_SECONDS:.0f} s") from None


@contextlib.asynccontextmanager
async def _running(root: Path, repository: Path) -> AsyncIterator[tuple[str, str]]:
    """The stand-in as a process; its URL and the key that it takes."""
    directory, address_file, log = root / "daytona", root / "daytona.address", root / "logs" / "daytona.log"
    for folder in (directory, log.parent):
        folder.mkdir(parents=True, exist_ok=True)
    command: Sequence[str] = (
        *(sys.executable, "-m", "tests.support.daytona", "--directory", str(directory), "--port", "0"),
        *("--address-file", str(address_file), "--delays", "measured"),
    )
    pid = daemons.spawn(command, log=log, cwd=repository, env=os.environ)
    try:
        yield await _told(address_file, pid, log)
    finally:
        steps = ((signal.SIGTERM, STOP_SECONDS), (signal.SIGKILL, 5.0))
        await asyncio.shield(asyncio.to_thread(daemons.end, pid, steps))


async def _told(address_file: Path, pid: int, log: Path) -> tuple[str, str]:
    try:
        async with asyncio.timeout(START_SECONDS):
            while not address_file.exists():
                if not daemons.alive(pid):
                    raise Unusable(f"the stand-in of Daytona ended at its start:\n{daemons.tail(log)}")
                await asyncio.sleep(0.02)
    except TimeoutError:
        raise Unusable(f"the stand-in of Daytona does not serve:\n{daemons.tail(log)}") from None
    told = json.loads(address_file.read_text())
    return told["url"], told["api_key"]
