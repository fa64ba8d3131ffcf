"""The toolbox of a running sandbox: commands, what it knows of itself, and who may call it."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress

from aiohttp import web

from tests.support.daytona import processes
from tests.support.daytona.delays import Chance, Delays
from tests.support.daytona.fleet import Fleet
from tests.support.daytona.journal import Journal
from tests.support.daytona.problems import DAEMON, Problem, not_found, not_running
from tests.support.daytona.processes import Base
from tests.support.daytona.sandbox import Sandbox
from tests.support.daytona.serving import Gate, Handler, body_of, reply

SHELL = "/bin/sh"
_LONGEST_SECONDS = 360
_ANY_ADDRESS = re.compile(r"(?<![\d.])0\.0\.0\.0(?![\d.])")
_VERSION = "0.190.0"


class Toolboxes:
    """Finds the sandbox that a call of the toolbox is for, as the real proxy does."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def sandbox(self, request: web.Request) -> Sandbox:
        """The sandbox, running; the call counts as its being in use."""
        reference = request.match_info["sandbox"]
        found = self._fleet.find(reference)
        if found.id != reference:
            raise not_found(reference)
        if found.state != "started" or found.base is None:
            raise not_running()
        found.touch()
        return found


class ProcessApi:
    """Handlers of single commands and of facts about the sandbox."""

    def __init__(self, toolboxes: Toolboxes, journal: Journal, delays: Delays) -> None:
        self._toolboxes = toolboxes
        self._journal = journal
        self._delays = delays
        self._chance = Chance(delays.seed)
        self._running: set[asyncio.Task[tuple[int, bytes]]] = set()

    def routes(self, gate: Gate) -> Sequence[web.RouteDef]:
        """Its routes, below the prefix of a toolbox."""

        def facts(handler: Handler) -> Handler:
            return gate.guard("execute", handler, source=DAEMON, classes=())

        return [
            web.post("/process/execute", gate.guard("execute", self._execute, source=DAEMON, classes=())),
            web.get("/work-dir", facts(self._home)),
            web.get("/user-home-dir", facts(self._home)),
            web.get("/version", facts(self._version)),
            web.post("/env", facts(self._environment)),
            web.get("/port", facts(self._ports)),
            web.get("/port/{port}/in-use", facts(self._in_use)),
        ]

    async def _execute(self, request: web.Request) -> web.StreamResponse:
        found = self._toolboxes.sandbox(request)
        body = await body_of(request)
        command = body.get("command")
        if not isinstance(command, str) or not command.strip():
            raise Problem(400, "command is required", source=DAEMON)
        timeout = body.get("timeout") or _LONGEST_SECONDS
        self._journal.write("process", sandbox=found.id, session=found.session, command=command)
        await asyncio.sleep(self._chance.seconds(self._delays.execute))
        task = asyncio.get_running_loop().create_task(
            run(found, command, cwd=body.get("cwd") or "", envs=body.get("envs") or {}, timeout=timeout)
        )
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        # The command goes on when its caller goes away.
        code, output = await asyncio.shield(task)
        return reply({"exitCode": code, "result": output.decode("utf-8", "replace")})

    async def _home(self, request: web.Request) -> web.StreamResponse:
        return reply({"dir": str(self._toolboxes.sandbox(request).home)})

    async def _version(self, request: web.Request) -> web.StreamResponse:
        self._toolboxes.sandbox(request)
        return reply({"version": _VERSION})

    async def _environment(self, request: web.Request) -> web.StreamResponse:
        found = self._toolboxes.sandbox(request)
        body = await body_of(request)
        for name in body.get("unset") or []:
            found.env.pop(name, None)
        found.env.update(body.get("set") or {})
        return reply({})

    async def _ports(self, request: web.Request) -> web.StreamResponse:
        return reply({"ports": sorted(_listening(self._toolboxes.sandbox(request)))})

    async def _in_use(self, request: web.Request) -> web.StreamResponse:
        found = self._toolboxes.sandbox(request)
        return reply({"isInUse": int(request.match_info["port"]) in _listening(found)})


async def run(found: Sandbox, command: str, *, cwd: str, envs: dict[str, str], timeout: float) -> tuple[int, bytes]:
    """Run a command to its end, and until nobody holds its output any more: exit code, output.

    Raises a 408 `Problem` after `timeout` seconds; what it started is killed then.
    """
    base = running(found)
    reader, writer = os.pipe()
    nothing = os.open(os.devnull, os.O_RDONLY)
    stream, transport = await _stream(reader)
    try:
        try:
            child = await base.spawn(
                [SHELL, "-c", localized(found, command)],
                str(found.home / cwd),
                {**found.environment(), **envs},
                [nothing, writer, writer],
            )
        finally:
            os.close(writer)
            os.close(nothing)
        async with asyncio.timeout(timeout):
            output = await stream.read()
            code = await child.ended()
    except TimeoutError:
        await end_tree(base, await asyncio.shield(child.pid))
        raise Problem(408, "command execution timeout", code="PROCESS_EXECUTION_TIMEOUT", source=DAEMON) from None
    except OSError as error:
        raise Problem(500, str(error), source=DAEMON) from error
    finally:
        transport.close()
    return (code if code >= 0 else -1), output


def running(found: Sandbox) -> Base:
    """The base of a sandbox that runs."""
    if found.base is None:
        raise not_running()
    return found.base


def localized(found: Sandbox, command: str) -> str:
    """The command with this sandbox's own address for "all addresses": sandboxes share the ports of this machine."""
    return _ANY_ADDRESS.sub(found.address, command)


async def end_tree(base: Base, pid: int) -> None:
    """Kill a process and all below it; return when none is left below the base."""
    tree = {pid} | await asyncio.to_thread(processes.below, {pid})
    while tree:
        for one in tree:
            with suppress(ProcessLookupError):
                os.kill(one, signal.SIGKILL)
        await asyncio.sleep(0.01)
        tree &= await asyncio.to_thread(processes.below, {base.pid})


async def _stream(descriptor: int) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    stream = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(stream), os.fdopen(descriptor, "rb", 0)
    )
    return stream, transport


async def lines(descriptor: int, each: Callable[[str], None]) -> None:
    """Call `each` with every line that comes from a pipe, until it ends."""
    stream, transport = await _stream(descriptor)
    try:
        async for line in stream:
            each(line.decode().strip())
    finally:
        transport.close()


def _listening(found: Sandbox) -> set[int]:
    """Ports on which something listens at the address of this sandbox."""
    wanted = "".join(f"{int(part):02X}" for part in reversed(found.address.split(".")))
    ports = set()
    with open("/proc/net/tcp") as table:
        for line in table:
            fields = line.split()
            if len(fields) > 3 and fields[3] == "0A" and fields[1].startswith(f"{wanted}:"):
                ports.add(int(fields[1].split(":")[1], 16))
    return ports
