"""Load generators as processes of their own, so that none of them is slowed by what another one does.

`Client.start("benchmarks.append:callers", ...)` runs that coroutine function in a new process, with a `Link` as its
first argument. Both sides exchange pickled values, in order.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import pickle
import struct
import sys
import traceback
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, Self

import uvloop

_ROOT = Path(__file__).resolve().parents[1]
_LENGTH = struct.Struct("<Q")
_END_SECONDS = 20.0


class ClientError(Exception):
    """A client process failed; the message is its traceback."""


class Client:
    """A client process as its starter sees it."""

    def __init__(self, process: Process, job: str) -> None:
        self._process = process
        self._job = job

    @classmethod
    async def start(cls, job: str, *arguments: object) -> Self:
        """Start the process; `job` is `module:function`, `arguments` are pickled."""
        environment = {key: value for key, value in os.environ.items() if not key.startswith(("HEARTH_", "OTEL_"))}
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "benchmarks.clients",
            job,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd=_ROOT,
            env={**environment, "GRPC_VERBOSITY": "NONE"},
            start_new_session=True,
        )
        client = cls(process, job)
        await client.send(arguments)
        return client

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    async def send(self, value: object = None) -> None:
        """Give the client a value."""
        assert self._process.stdin is not None
        content = pickle.dumps(value)
        self._process.stdin.write(_LENGTH.pack(len(content)) + content)
        await self._process.stdin.drain()

    async def receive(self, timeout: float = 120.0) -> Any:
        """The next value from the client. Raises `ClientError` when it failed or says nothing."""
        assert self._process.stdout is not None
        try:
            async with asyncio.timeout(timeout):
                good, value = await _read(self._process.stdout)
        except (asyncio.IncompleteReadError, TimeoutError):
            raise ClientError(f"{self._job} says nothing (exit code {self._process.returncode})") from None
        if not good:
            raise ClientError(f"{self._job} failed:\n{value}")
        return value

    async def close(self) -> None:
        """End the process, whatever it does."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            async with asyncio.timeout(_END_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self._process.kill()
            await self._process.wait()
        # Else its pipe is closed by the garbage collector, which complains.
        assert self._process.stdout is not None
        await self._process.stdout.read()


@asynccontextmanager
async def clients(*jobs: tuple[object, ...]) -> AsyncIterator[Sequence[Client]]:
    """Client processes for the block; each job is its name and its arguments."""
    async with AsyncExitStack() as stack:
        started = []
        for name, *arguments in jobs:
            client = await Client.start(str(name), *arguments)
            stack.push_async_callback(client.close)
            started.append(client)
        yield started


async def receive_all(group: Sequence[Client], timeout: float = 120.0) -> list[Any]:
    """The next value of each."""
    return list(await asyncio.gather(*(client.receive(timeout) for client in group)))


async def send_all(group: Sequence[Client], value: object = None) -> None:
    """The same value to each."""
    await asyncio.gather(*(client.send(value) for client in group))


class Link:
    """The starter as a client process sees it."""

    def __init__(self, answers: int) -> None:
        self._answers = answers
        self._values: asyncio.Queue[Any] = asyncio.Queue()

    async def receive(self) -> Any:
        """The next value from the starter."""
        return await self._values.get()

    async def send(self, value: object = None) -> None:
        """Give the starter a value."""
        await asyncio.to_thread(self._write, True, value)

    async def _take(self, reader: asyncio.StreamReader) -> None:
        """Queue what the starter sends, until it closes its side."""
        with contextlib.suppress(asyncio.IncompleteReadError):
            while True:
                self._values.put_nowait(await _read(reader))

    def _write(self, good: bool, value: object) -> None:
        content = pickle.dumps((good, value))
        with contextlib.suppress(BrokenPipeError), os.fdopen(os.dup(self._answers), "wb") as answers:
            answers.write(_LENGTH.pack(len(content)) + content)


Job = Callable[..., Awaitable[None]]


async def _read(reader: asyncio.StreamReader) -> Any:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    # Both ends of the pipe are ours.
    return pickle.loads(await reader.readexactly(length))


async def _serve(job: Job, answers: int) -> None:
    """Run the job until it returns or the starter is gone."""
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    link = Link(answers)
    arguments = await _read(reader)
    taking = asyncio.create_task(link._take(reader))
    working = asyncio.ensure_future(job(link, *arguments))
    await asyncio.wait([taking, working], return_when=asyncio.FIRST_COMPLETED)
    if working.done() and (error := working.exception()) is not None:
        link._write(False, "".join(traceback.format_exception(error)))
    if working.done():
        # Its CPU time can be read for as long as it is there.
        await asyncio.wait([taking])
    for task in (taking, working):
        task.cancel()
    await asyncio.wait([taking, working])


def main() -> None:
    """Entry point of a client process."""
    module, _, name = sys.argv[1].partition(":")
    # Whatever prints goes to stderr; the pipe is for values only.
    answers = os.dup(1)
    os.dup2(2, 1)
    uvloop.run(_serve(getattr(importlib.import_module(module), name), answers))


if __name__ == "__main__":
    main()
