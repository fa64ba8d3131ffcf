"""Starts the scripted agent on stdin and stdout."""

import asyncio
import os
import signal
import sys
from pathlib import Path

from hearth.agents.scripted.agent import ScriptedAgent
from hearth.agents.scripted.journal import Journal
from hearth.agents.scripted.sessions import Sessions
from hearth.agents.scripted.turn import GARBAGE


def main() -> None:
    """Serve until the input ends. Exit code 0, or what $HEARTH_SCRIPTED_START says."""
    start = os.environ.get("HEARTH_SCRIPTED_START", "")
    if start.startswith("exit:"):
        print("the scripted agent does not start, as HEARTH_SCRIPTED_START says", file=sys.stderr)
        sys.exit(int(start.removeprefix("exit:")))
    if start in ("hang", "garbage"):
        for _ in sys.stdin.buffer:
            if start == "garbage":
                sys.stdout.buffer.write(GARBAGE)
                sys.stdout.buffer.flush()
        return
    if start:
        sys.exit(f"HEARTH_SCRIPTED_START: unknown value {start!r}")
    asyncio.run(_serve())


async def _serve() -> None:
    state = os.environ.get("HEARTH_AGENT_STATE")
    sessions = Sessions(Path(state) if state else Path.home() / ".hearth-scripted")
    shown = os.environ.get("HEARTH_SCRIPTED_LOG_VALUES", "").split()
    agent = ScriptedAgent(sessions, Journal(os.environ.get("HEARTH_SCRIPTED_LOG"), shown))
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, told.set)
    await agent.connection.open()
    serving = asyncio.create_task(agent.connection.serve())
    ending = asyncio.create_task(told.wait())
    await asyncio.wait([serving, ending], return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        await serving
        if agent.stubborn:
            await ending
    await agent.processes.kill()
    # No orderly end: nobody reads any more, and what had to be kept is on the disk.
    os._exit(0)


if __name__ == "__main__":
    main()
