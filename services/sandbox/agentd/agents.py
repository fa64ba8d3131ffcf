"""One agent server: an ACP agent as a child process, its messages in a ring, its answers given to whoever asked."""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from services.sandbox.agentd import problems
from services.sandbox.agentd.children import Child, Children
from services.sandbox.agentd.jsonrpc import Lines, LineTooLong, MalformedMessage, Message, notification, read_agent_line
from services.sandbox.agentd.logfile import LogFile
from services.sandbox.agentd.problems import Problem
from services.sandbox.agentd.ring import Ring

logger = logging.getLogger(__name__)

INPUT_BYTES = 32 * 1024 * 1024
GRACE_S = 0.5
DRAIN_S = 0.5
GARBAGE_SHOWN = 100
GARBAGE_CHARACTERS = 200


@dataclass(frozen=True)
class AgentCommand:
    """How to start one agent: the program and its arguments, variables on top of the daemon's own, the directory."""

    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    cwd: str | None = None


class AgentServer:
    """A running agent and all that was said by it. Made by `start`; over after `close`.

    The agent's output is read as fast as it comes, whether or not somebody listens, so no reader can stall an agent.
    """

    def __init__(self, server_id: str, agent: str, child: Child, children: Children, initialize_timeout: float) -> None:
        self.server_id = server_id
        self.agent = agent
        self.created_at_ms = int(time.time() * 1000)
        self.ring = Ring()
        self.garbage = 0
        self._child = child
        self._children = children
        self._initialize_timeout = initialize_timeout
        self._pending: dict[str, asyncio.Future[bytes | Problem]] = {}
        self._refusal: str | None = None  # why nothing more can be sent
        self._failure: str | None = None  # why the daemon itself ends the agent
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._input: asyncio.WriteTransport | None = None
        self._life: asyncio.Task[None] | None = None
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def start(
        cls,
        server_id: str,
        agent: str,
        command: AgentCommand,
        *,
        children: Children,
        environment: Mapping[str, str],
        log: LogFile,
        initialize_timeout: float,
    ) -> "AgentServer":
        """Start the agent. Raises Problem (500 agent_start_failed) when its command cannot be run."""
        try:
            child = children.spawn(command.command, env={**environment, **command.env}, cwd=command.cwd)
        except (OSError, ValueError) as error:
            raise problems.agent_start_failed(f"agent '{agent}': {error}") from None
        server = cls(server_id, agent, child, children, initialize_timeout)
        server._life = asyncio.create_task(server._live(log))
        loop = asyncio.get_running_loop()
        stdin = child.popen.stdin
        assert stdin is not None
        server._input, _ = await loop.connect_write_pipe(asyncio.Protocol, stdin)
        logger.info("agent started", extra={"server": server_id, "agent": agent, "pid": child.pid})
        return server

    @property
    def pid(self) -> int:
        """Process id of the agent."""
        return self._child.pid

    @property
    def closing(self) -> bool:
        """True once `close` was called."""
        return self._closing is not None

    async def request(self, message: Message) -> bytes:
        """Send a request and wait for its answer, however long that takes (`initialize` has a time limit).

        Raises Problem: 409 when its id is in flight already, 502 when the agent is dead or dies, 504 for initialize.
        """
        assert message.request is not None
        if message.request in self._pending:
            raise problems.conflict(f"a request with id {message.request} is in flight")
        answer: asyncio.Future[bytes | Problem] = asyncio.get_running_loop().create_future()
        self.send(message)
        self._pending[message.request] = answer
        if message.method == "initialize":
            await asyncio.wait([answer], timeout=self._initialize_timeout)
            if not answer.done():
                self._resolve(message.request, problems.timeout(f"no answer in {self._initialize_timeout:g} s"))
                self._fail("initialize_timeout")
        result = await answer
        if isinstance(result, Problem):
            raise result
        return result

    def send(self, message: Message) -> None:
        """Pass a message on to the agent. Raises Problem (502) when the agent cannot take it."""
        if self._refusal is not None:
            raise problems.stream_error(self._refusal)
        assert self._input is not None
        if self._input.is_closing():
            raise problems.stream_error("the agent closed its input")
        if self._input.get_write_buffer_size() > INPUT_BYTES:
            raise problems.stream_error("the agent does not read its input")
        self._input.write(message.line + b"\n")

    async def close(self, grace: float = GRACE_S) -> None:
        """End the agent with its whole process tree, then the ring. Calling it again waits for the first call.

        Raises Problem (500 tree_alive) when processes are left; the next call tries again.
        """
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(grace))
        try:
            await asyncio.shield(self._closing)
        except Problem:
            self._closing = None
            raise

    async def _close(self, grace: float) -> None:
        self._refuse("the server was deleted")
        if self._input is not None:
            self._input.close()
        alive = await self._children.kill(self._child, grace=grace)
        if alive:
            raise problems.tree_alive(", ".join(map(str, sorted(alive))))
        assert self._life is not None
        await self._life
        self.ring.close()
        logger.info("agent server closed", extra={"server": self.server_id})

    async def _live(self, log: LogFile) -> None:
        """From the start to the end of the process: read all it writes, say that it ended, clear up after it."""
        output, errors = self._child.popen.stdout, self._child.popen.stderr
        assert output is not None
        assert errors is not None
        reading = asyncio.create_task(self._read_output(output))
        logging_errors = asyncio.create_task(_copy(errors, log))
        failed, exited = self._failed, self._child.exited
        await asyncio.wait((exited, reading, failed), return_when=asyncio.FIRST_COMPLETED)
        if not exited.done() and not failed.done():
            # An agent whose output ended says nothing more; usually it is about to exit.
            await asyncio.wait((exited, failed), timeout=DRAIN_S, return_when=asyncio.FIRST_COMPLETED)
            if not exited.done():
                self._fail("output_closed")
        if not exited.done():
            await self._children.kill(self._child, grace=0)
        code = await exited
        # What the agent wrote last may still be on its way; a child it left behind can keep the pipe open for ever.
        await asyncio.wait([reading, logging_errors], timeout=DRAIN_S)
        reading.cancel()
        logging_errors.cancel()
        for outcome in await asyncio.gather(reading, logging_errors, return_exceptions=True):
            if isinstance(outcome, Exception):
                logger.error("reading the agent failed", extra={"server": self.server_id}, exc_info=outcome)
        how = f"exited with code {code}" if code >= 0 else f"was ended by signal {-code}"
        why = f" ({self._failure})" if self._failure else ""
        self._refuse(f"the agent {how}{why}")
        self.ring.append(notification("_adapter/agent_exited", self._ending(code)))
        logger.info("agent exited", extra={"server": self.server_id, "code": code, "reason": self._failure})
        if self._input is not None:
            self._input.close()
        await self._children.kill(self._child, grace=0)

    def _ending(self, code: int) -> dict[str, object]:
        ending: dict[str, object] = {"code": code if code >= 0 else None, "success": code == 0 and not self._failure}
        if code < 0:
            ending["signal"] = -code
        if self._failure:
            ending["reason"] = self._failure
        return ending

    async def _read_output(self, pipe: IO[bytes]) -> None:
        lines = Lines()
        reader, transport = await _open(pipe)
        try:
            while chunk := await reader.read(256 * 1024):
                for line in lines.feed(chunk):
                    self._take(line)
        except LineTooLong:
            self._fail("line_too_long")
        finally:
            transport.close()

    def _take(self, line: bytes) -> None:
        try:
            message = read_agent_line(line)
        except MalformedMessage as error:
            self.garbage += 1
            # Each would push a real message out of the ring; an agent gone mad must not empty it.
            if self.garbage <= GARBAGE_SHOWN:
                raw = line[: 4 * GARBAGE_CHARACTERS].decode("utf-8", "replace")[:GARBAGE_CHARACTERS]
                self.ring.append(notification("_adapter/invalid_stdout", {"error": str(error), "raw": raw}))
            if self.garbage in (1, 10, 100) or self.garbage % 1000 == 0:
                logger.warning("agent wrote garbage", extra={"server": self.server_id, "lines": self.garbage})
            return
        self.ring.append(message.line)
        if message.answer is not None:
            self._resolve(message.answer, message.line)

    def _fail(self, reason: str) -> None:
        self._failure = self._failure or reason
        self._refuse(f"the agent failed: {self._failure}")
        if not self._failed.done():
            self._failed.set_result(None)
        logger.warning("agent failed", extra={"server": self.server_id, "reason": reason})

    def _refuse(self, why: str) -> None:
        """From now on nothing is sent; whoever waits for an answer learns why there will be none."""
        self._refusal = why
        for key in list(self._pending):
            self._resolve(key, problems.stream_error(why))

    def _resolve(self, key: str, result: bytes | Problem) -> None:
        answer = self._pending.pop(key, None)
        if answer is not None and not answer.done():
            answer.set_result(result)


async def _open(pipe: IO[bytes]) -> tuple[asyncio.StreamReader, asyncio.ReadTransport]:
    reader = asyncio.StreamReader(limit=1024 * 1024)
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
    return reader, transport


async def _copy(pipe: IO[bytes], log: LogFile) -> None:
    reader, transport = await _open(pipe)
    try:
        while chunk := await reader.read(64 * 1024):
            log.write(chunk)
    finally:
        transport.close()
