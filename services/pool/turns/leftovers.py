"""What a stopped turn may have left running in its sandbox: read from `ps`, decided here.

Agents do not always end what their tools started. A process that started after the prompt and is not of the agent's
own tree must not go on working behind a user who pressed Stop.
"""

from __future__ import annotations

import dataclasses
import logging
import math

from services.pool.harness.port import HarnessError, HarnessSession

logger = logging.getLogger(__name__)

# The first line tells who listed (it becomes `ps` itself) and its parent, which is the daemon.
_LIST = ("sh", ("-c", 'echo "$$ $PPID"; exec ps -eo pid=,ppid=,etimes=,stat='))
_SECONDS = 3.0
_ROUNDS = 3
# `ps` counts whole seconds.
_TOLERANCE = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Process:
    """A line of `ps`: how many seconds ago it started, and whether it is dead and only waits to be reaped."""

    pid: int
    parent: int
    age: int
    zombie: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Listing:
    """All processes of a machine, without the one that listed them."""

    daemon: int
    processes: tuple[Process, ...]

    def below_daemon(self) -> list[Process]:
        """What the daemon started, directly or not."""
        children: dict[int, list[Process]] = {}
        for process in self.processes:
            children.setdefault(process.parent, []).append(process)
        found: list[Process] = []
        parents = [self.daemon]
        while parents:
            below = children.pop(parents.pop(), [])
            found += below
            parents += [process.pid for process in below]
        return found


def parse(text: str) -> Listing:
    """The output of the listing command. Raises ValueError when it is not understood."""
    first, *lines = text.splitlines() or [""]
    own, daemon = (int(word) for word in first.split())
    processes = []
    for line in lines:
        pid, parent, age, state = line.split(maxsplit=3)
        if int(pid) != own:
            processes.append(Process(int(pid), int(parent), int(age), state.startswith("Z")))
    return Listing(daemon, tuple(processes))


def leftovers(listing: Listing, known: frozenset[int], since_prompt: float, *, isolated: bool) -> list[int]:
    """Processes to end: started in the last `since_prompt` seconds, and not `known` as the agent's own.

    On a machine that is not the sandbox's alone only what hangs below the daemon counts; where it is, everything does
    but its first process and the kernel's.
    """
    young = math.ceil(since_prompt) + _TOLERANCE
    if isolated:
        found = [one for one in listing.processes if one.pid not in {1, 2, listing.daemon} and one.parent != 2]
    else:
        found = listing.below_daemon()
    return [one.pid for one in found if one.pid not in known and one.age <= young and not one.zombie]


async def own_processes(harness: HarnessSession) -> frozenset[int] | None:
    """The agent's own tree, right after it was opened; None when it cannot be known."""
    listing = await _list(harness)
    return frozenset(process.pid for process in listing.below_daemon()) if listing is not None else None


async def end_leftovers(
    harness: HarnessSession, known: frozenset[int] | None, since_prompt: float, *, isolated: bool
) -> bool:
    """End what a stopped turn left; True when nothing is left, False when something is or nobody can tell."""
    if known is None:
        return False
    for _ in range(_ROUNDS):
        listing = await _list(harness)
        if listing is None:
            return False
        left = leftovers(listing, known, since_prompt, isolated=isolated)
        if not left:
            return True
        logger.info("ending what a stopped turn left running", extra={"processes": len(left)})
        try:
            await harness.run_process("kill", ["-9", *map(str, left)], timeout=_SECONDS)
        except HarnessError as error:
            logger.warning("leftovers were not ended", extra={"reason": error.reason})
            return False
    return False


async def agent_gone(harness: HarnessSession, known: frozenset[int] | None) -> bool:
    """Whether nothing is left of the agent's own tree, seen twice; False when that cannot be known.

    A daemon that waits for the end of an agent's output does not notice its death while a child holds that open.
    """
    if not known:
        return False
    for _ in range(2):
        listing = await _list(harness)
        if listing is None or any(one.pid in known and not one.zombie for one in listing.processes):
            return False
    return True


async def _list(harness: HarnessSession) -> Listing | None:
    command, args = _LIST
    try:
        code, text = await harness.run_process(command, args, timeout=_SECONDS)
        if code != 0:
            raise ValueError(f"exit code {code}")
        return parse(text)
    except HarnessError as error:
        logger.warning("processes were not listed", extra={"reason": error.reason})
    except ValueError as error:
        logger.warning("the list of processes is not understood", extra={"cause": str(error)})
    return None
