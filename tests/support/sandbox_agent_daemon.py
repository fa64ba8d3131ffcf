"""The real sandbox-agent behind the flags of agentd, so that local sandboxes can run it in agentd's place.

`HEARTH_LOCAL_DAEMON='["python", "tests/support/sandbox_agent_daemon.py", "<binary>"]'`: writes the launchers of the
agents file where sandbox-agent looks for them, takes a free port, becomes sandbox-agent, and tells the port once it
answers.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import sys
import time
from pathlib import Path

# sandbox-agent knows its agents by name; any of these names may stand for any command.
KINDS = ("claude", "codex", "opencode", "pi")
SECONDS = 20.0


def write_launchers(agents_file: Path, home: Path) -> None:
    """One launcher for each agent that sandbox-agent has a name for."""
    folder = home / ".local/share/sandbox-agent/bin"
    (folder / "agent_processes").mkdir(parents=True, exist_ok=True)
    for name, agent in json.loads(agents_file.read_text()).items():
        if name not in KINDS:
            continue
        exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in agent["env"].items())
        launch = f"{exports}cd {shlex.quote(agent['cwd'])} && exec {shlex.join(agent['command'])}"
        for path, line in ((folder / name, "exit 0"), (folder / "agent_processes" / f"{name}-acp", launch)):
            path.write_text(f"#!/bin/sh\n{line}\n")
            path.chmod(0o755)


def tell_port_when_open(port: int, port_file: Path) -> None:
    """Wait for the server, then write its port as agentd does."""
    ends = time.monotonic() + SECONDS
    while time.monotonic() < ends:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                draft = port_file.with_name(".port")
                draft.write_text(str(port))
                draft.replace(port_file)
                return
        time.sleep(0.01)
    sys.exit(f"sandbox-agent does not listen on {port}")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser()
    parser.add_argument("binary")
    for flag in ("--host", "--port", "--token-file", "--agents-file", "--port-file", "--log-dir"):
        parser.add_argument(flag)
    options = parser.parse_args()
    write_launchers(Path(options.agents_file), Path(os.environ["HOME"]))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
    if os.fork() == 0:
        tell_port_when_open(port, Path(options.port_file))
        os._exit(0)
    token = Path(options.token_file).read_text().strip()
    os.environ["SANDBOX_AGENT_BIN"] = options.binary
    os.environ["SANDBOX_AGENT_ACP_REQUEST_TIMEOUT_MS"] = "7200000"
    arguments = ["server", "--token", token, "--no-telemetry", "--host", "127.0.0.1", "--port", str(port)]
    os.execv(options.binary, [options.binary, *arguments])


if __name__ == "__main__":
    main()
