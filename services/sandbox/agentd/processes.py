"""`/v1/processes/run`: run one command to its end and return what it wrote."""

import asyncio
import json
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from time import monotonic

from services.sandbox.agentd.children import Children
from services.sandbox.agentd.problems import invalid_request, stream_error

TIMEOUT_MS = 30_000
MAX_TIMEOUT_MS = 600_000
OUTPUT_BYTES = 1024 * 1024
MAX_OUTPUT_BYTES = 16 * 1024 * 1024
DRAIN_S = 0.2


@dataclass(frozen=True)
class RunRequest:
    """What to run. `output_bytes` bounds each of the two outputs; the rest of it is read and thrown away."""

    command: str
    args: list[str] = field(default_factory=list)
    cwd: str | None = None
    env: dict[str, str] = field(default_factory=dict)
    timeout_ms: int = TIMEOUT_MS
    output_bytes: int = OUTPUT_BYTES


def read_run_request(body: bytes) -> RunRequest:
    """The POST body as a request. Raises Problem (400) naming the field."""
    try:
        value: object = json.loads(body)
    except RecursionError:
        raise invalid_request("invalid JSON body: it is nested too deeply") from None
    except ValueError as error:
        raise invalid_request(f"invalid JSON body: {error}") from None
    if not isinstance(value, dict):
        raise invalid_request("request body must be a JSON object")
    command = value.get("command")
    if not isinstance(command, str) or not command:
        raise invalid_request("field 'command' must be a non-empty string")
    args = value.get("args") or []
    if not isinstance(args, list) or not all(isinstance(item, str) for item in args):
        raise invalid_request("field 'args' must be a list of strings")
    cwd = value.get("cwd")
    if cwd is not None and not isinstance(cwd, str):
        raise invalid_request("field 'cwd' must be a string")
    env = value.get("env") or {}
    if not isinstance(env, dict) or not all(isinstance(item, str) for item in env.values()):
        raise invalid_request("field 'env' must be an object of strings")
    return RunRequest(
        command,
        args,
        cwd,
        env,
        _number(value, "timeoutMs", TIMEOUT_MS, MAX_TIMEOUT_MS),
        _number(value, "maxOutputBytes", OUTPUT_BYTES, MAX_OUTPUT_BYTES),
    )


async def run(request: RunRequest, children: Children, environment: Mapping[str, str]) -> dict[str, object]:
    """Run the command → `{exitCode, timedOut, stdout, stderr, stdoutTruncated, stderrTruncated, durationMs}`.

    `exitCode` is null when a signal or the time limit ended it; at the limit its whole tree is killed. Raises Problem
    (502 stream_error) when it cannot be started.
    """
    started = monotonic()
    try:
        child = children.spawn(
            [request.command, *request.args],
            env={**environment, **request.env},
            cwd=request.cwd,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, ValueError) as error:
        raise stream_error(f"failed to spawn process: {error}") from None
    assert child.popen.stdout is not None
    assert child.popen.stderr is not None
    outputs = [_Output(request.output_bytes), _Output(request.output_bytes)]
    loop = asyncio.get_running_loop()
    transports = [
        (await loop.connect_read_pipe(lambda: outputs[0], child.popen.stdout))[0],
        (await loop.connect_read_pipe(lambda: outputs[1], child.popen.stderr))[0],
    ]
    try:
        await asyncio.wait([child.exited], timeout=request.timeout_ms / 1000)
        timed_out = not child.exited.done()
        if timed_out:
            await children.kill(child, grace=0)
        # A process left in the background may hold the pipes open; what the command itself wrote is there already.
        await asyncio.wait([output.ended for output in outputs], timeout=DRAIN_S)
    finally:
        for transport in transports:
            transport.close()
    code = child.exited.result() if child.exited.done() and not timed_out else None
    return {
        "exitCode": code if code is not None and code >= 0 else None,
        "timedOut": timed_out,
        "stdout": outputs[0].text,
        "stderr": outputs[1].text,
        "stdoutTruncated": outputs[0].truncated,
        "stderrTruncated": outputs[1].truncated,
        "durationMs": int((monotonic() - started) * 1000),
    }


class _Output(asyncio.Protocol):
    """Keeps the first `limit` bytes of a pipe."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._content = bytearray()
        self.truncated = False
        self.ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def text(self) -> str:
        return self._content.decode("utf-8", "replace")

    def data_received(self, data: bytes) -> None:
        room = self._limit - len(self._content)
        self._content += data[:room]
        self.truncated = self.truncated or len(data) > room

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.ended.done():
            self.ended.set_result(None)


def _number(value: Mapping[str, object], name: str, default: int, most: int) -> int:
    number = value.get(name, default)
    if number is None:
        return default
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= most:
        raise invalid_request(f"field '{name}' must be an integer from 1 to {most}")
    return number
