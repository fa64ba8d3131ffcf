"""Starts agentd: arguments → agents → HTTP server, until SIGTERM.

    python -m services.sandbox.agentd --agents-file PATH [--token-file PATH] [--host 127.0.0.1] [--port 0]
                                      [--port-file PATH] [--log-dir PATH] [--initialize-timeout 60] [--heartbeat 15]

The token comes from the token file or from HEARTH_AGENTD_TOKEN, never from the arguments, which every user of the
machine can read. The agents file is JSON: name → {"command": [program, …], "env": {…}, "cwd": path}; `env` and `cwd`
may be missing. Exit codes: 0 after SIGTERM or SIGINT, 1 when the port cannot be bound, 2 for wrong arguments.
"""

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
from pathlib import Path

from aiohttp import web

from services.sandbox.agentd.agents import AgentCommand
from services.sandbox.agentd.children import Children
from services.sandbox.agentd.server import Daemon

logger = logging.getLogger("services.sandbox.agentd")

TOKEN_VARIABLE = "HEARTH_AGENTD_TOKEN"  # noqa: S105 - the name of the variable
STOP_GRACE_S = 0.3


class WrongArguments(Exception):
    """An argument or a file named by one is wrong; the text says which and why."""


def main(argv: list[str] | None = None) -> int:
    """Run until stopped; returns the exit code."""
    parser = argparse.ArgumentParser(prog="agentd", description="ACP over HTTP in front of stdio agents.")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one (default)")
    parser.add_argument("--port-file", type=Path, help="file to write the bound port to")
    parser.add_argument("--token-file", type=Path, help=f"file with the token; else the variable {TOKEN_VARIABLE}")
    parser.add_argument("--agents-file", type=Path, required=True, help="JSON: name to command, env, cwd")
    parser.add_argument("--log-dir", type=Path, help="where agents' stderr goes (default: beside the port file)")
    parser.add_argument("--initialize-timeout", type=float, default=60.0, metavar="SECONDS")
    parser.add_argument("--heartbeat", type=float, default=15.0, metavar="SECONDS", help="of silence on a stream")
    options = parser.parse_args(argv)
    handler = logging.StreamHandler()
    handler.setFormatter(_Formatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # It tells of each request that is no HTTP, with a stack. What fails in a handler is told by the daemon itself.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)
    try:
        token = read_token(options.token_file)
        agents = read_agents(options.agents_file)
        if options.initialize_timeout <= 0 or options.heartbeat <= 0:
            raise WrongArguments("--initialize-timeout and --heartbeat must be positive")
    except WrongArguments as error:
        print(f"agentd: {error}", file=sys.stderr)
        return 2
    log_dir = options.log_dir or (options.port_file.parent if options.port_file else Path.cwd())
    try:
        asyncio.run(_serve(options, token, agents, log_dir))
    except OSError as error:
        print(f"agentd: cannot serve on {options.host}:{options.port}: {error}", file=sys.stderr)
        return 1
    return 0


def read_token(path: Path | None) -> str:
    """The token from the file, else from the environment. Raises WrongArguments."""
    if path is not None:
        try:
            token = path.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise WrongArguments(f"--token-file: {error}") from None
    else:
        token = os.environ.get(TOKEN_VARIABLE, "").strip()
    if not token:
        raise WrongArguments(f"no token: give --token-file or set {TOKEN_VARIABLE}")
    return token


def read_agents(path: Path) -> dict[str, AgentCommand]:
    """The agents of the agents file. Raises WrongArguments naming the agent and the field."""
    try:
        value: object = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise WrongArguments(f"--agents-file: {error}") from None
    if not isinstance(value, dict):
        raise WrongArguments("--agents-file: must be a JSON object")
    return {name: _read_agent(name, entry) for name, entry in value.items()}


def _read_agent(name: str, entry: object) -> AgentCommand:
    where = f"--agents-file: agent '{name}'"
    if not name or "/" in name or not name.isprintable():
        raise WrongArguments(f"{where}: the name must be printable, without '/'")
    if not isinstance(entry, dict):
        raise WrongArguments(f"{where}: must be an object")
    command, env, cwd = entry.get("command"), entry.get("env") or {}, entry.get("cwd")
    if not isinstance(command, list) or not command or not all(isinstance(part, str) for part in command):
        raise WrongArguments(f"{where}: 'command' must be a list of strings")
    if not isinstance(env, dict) or not all(isinstance(part, str) for part in env.values()):
        raise WrongArguments(f"{where}: 'env' must be an object of strings")
    if cwd is not None and not isinstance(cwd, str):
        raise WrongArguments(f"{where}: 'cwd' must be a string")
    return AgentCommand(command, env, cwd)


async def _serve(options: argparse.Namespace, token: str, agents: dict[str, AgentCommand], log_dir: Path) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    daemon = Daemon(
        token=token,
        agents=agents,
        children=Children(),
        # The agent runs under the same user, but need not be handed the key to its own daemon.
        environment={name: value for name, value in os.environ.items() if name != TOKEN_VARIABLE},
        log_dir=log_dir,
        initialize_timeout=options.initialize_timeout,
        heartbeat=options.heartbeat,
    )
    runner = web.AppRunner(daemon.application(), access_log=None, keepalive_timeout=600, shutdown_timeout=0.2)
    await runner.setup()
    try:
        await web.TCPSite(runner, options.host, options.port).start()
        port = runner.addresses[0][1]
        if options.port_file is not None:
            _write_atomically(options.port_file, f"{port}\n")
        logger.info("serving", extra={"host": options.host, "port": port, "pid": os.getpid()})
        await stop.wait()
        logger.info("stopping")
    finally:
        await daemon.stop(STOP_GRACE_S)
        await runner.cleanup()


def _write_atomically(path: Path, text: str) -> None:
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


class _Formatter(logging.Formatter):
    """One line a record, its extra fields as JSON behind the words."""

    _standard = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime"}

    def formatMessage(self, record: logging.LogRecord) -> str:
        extra = {name: value for name, value in vars(record).items() if name not in self._standard}
        return super().formatMessage(record) + (f" {json.dumps(extra, default=str)}" if extra else "")


if __name__ == "__main__":
    sys.exit(main())
