"""A program in a terminal: what it shows, and what somebody types."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence

_SECONDS = 60.0
_CONTROL = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]|\r")


class Terminal:
    """One program; `shown` is all that it wrote so far, without colours, and what was typed."""

    def __init__(self, process: asyncio.subprocess.Process, master: int) -> None:
        self.process = process
        self.shown = ""
        self._master = master
        self._changed = asyncio.Event()

    def read(self) -> None:
        """Take what can be read now."""
        try:
            chunk = os.read(self._master, 65536)
        except OSError:
            chunk = b""
        if chunk:
            self.shown += _CONTROL.sub("", chunk.decode("utf-8", "replace"))
        else:
            asyncio.get_running_loop().remove_reader(self._master)
        self._changed.set()

    def type(self, text: str) -> None:
        """Type something; a line ends with a newline."""
        os.write(self._master, text.encode())

    async def sees(self, text: str, *, after: int = 0) -> int:
        """Wait until it shows `text` behind the place `after`; the place behind it."""
        try:
            async with asyncio.timeout(_SECONDS):
                while (found := self.shown.find(text, after)) < 0:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise AssertionError(f"{text!r} was not shown in:\n{self.shown[after:]}") from None
        return found + len(text)

    async def ends(self) -> int:
        """Wait for its end; the exit code."""
        async with asyncio.timeout(_SECONDS):
            return await self.process.wait()


@contextlib.asynccontextmanager
async def terminal(command: Sequence[str | os.PathLike[str]], env: Mapping[str, str]) -> AsyncIterator[Terminal]:
    """The program in a terminal of its own, for the block."""
    master, slave = os.openpty()
    try:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=slave, stdout=slave, stderr=slave, env=dict(env), start_new_session=True
        )
    finally:
        os.close(slave)
    found = Terminal(process, master)
    loop = asyncio.get_running_loop()
    loop.add_reader(master, found.read)
    try:
        yield found
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        loop.remove_reader(master)
        os.close(master)
