"""The stand-in as a program: serves until SIGTERM or SIGINT.

    python -m tests.support.daytona --directory D [--port 0] [--address-file F] [--delays measured|none]
                                    [--agent-command JSON] [--minute SECONDS] [--patience SECONDS] [--seed N]
                                    [--api-key KEY] [--no-events]

Writes {"url", "api_key", "admin"} as JSON to the address file and to stdout.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
from pathlib import Path

from tests.support.daytona.admin import PREFIX
from tests.support.daytona.delays import Delays
from tests.support.daytona.stand_in import Options, serve


def main() -> None:
    """Run until stopped."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.daytona", description="A stand-in of Daytona.")
    parser.add_argument("--directory", type=Path, required=True, help="for its sandboxes and volumes")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one (default)")
    parser.add_argument("--address-file", type=Path, help="file to write its addresses to")
    parser.add_argument("--delays", choices=["measured", "none"], default="none")
    parser.add_argument("--agent-command", type=json.loads, default=[], help="JSON list: what `sandbox-agent` means")
    parser.add_argument("--minute", type=float, default=60.0, help="seconds that a minute of a timer lasts")
    parser.add_argument("--patience", type=float, default=30.0, help="seconds for which create and start wait")
    parser.add_argument("--no-events", action="store_true", help="without Socket.IO: the SDK polls")
    parser.add_argument("--seed", type=int, default=1, help="of delays and faults")
    parser.add_argument("--api-key", default="", help="made up when not given")
    given = parser.parse_args()
    delays = Delays.measured(given.seed) if given.delays == "measured" else Delays(seed=given.seed)
    options = Options(
        delays=delays,
        agent_command=given.agent_command,
        port=given.port,
        minute=given.minute,
        patience=given.patience,
        events=not given.no_events,
        api_key=given.api_key,
    )
    asyncio.run(_serve(given.directory, options, given.address_file))


async def _serve(directory: Path, options: Options, address_file: Path | None) -> None:
    stopped = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    async with serve(directory, options) as stand_in:
        admin = stand_in.url.removesuffix("/api") + PREFIX
        text = json.dumps({"url": stand_in.url, "api_key": stand_in.api_key, "admin": admin})
        print(text, flush=True)
        if address_file is not None:
            draft = address_file.with_name(f".{address_file.name}.{os.getpid()}")
            draft.write_text(text)
            draft.replace(address_file)
        await stopped.wait()


if __name__ == "__main__":
    main()
