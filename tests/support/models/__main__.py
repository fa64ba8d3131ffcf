"""Serves the stand-in until a signal comes: `python -m tests.support.models [--port N] [--port-file FILE]`."""

from __future__ import annotations

import argparse
import asyncio
import signal
from pathlib import Path

from tests.support.models.server import serving


async def run(port: int, port_file: Path | None) -> None:
    """Serve, and tell the port once it is open."""
    ended = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ended.set)
    async with serving(port) as url:
        print(url, flush=True)
        if port_file is not None:
            draft = port_file.with_name(f".{port_file.name}")
            draft.write_text(url.rpartition(":")[2])
            draft.replace(port_file)
        await ended.wait()


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.models", description=__doc__)
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--port-file", type=Path, help="gets the port once it is open")
    options = parser.parse_args()
    asyncio.run(run(options.port, options.port_file))


if __name__ == "__main__":
    main()
