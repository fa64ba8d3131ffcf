"""What keeps the tables of commands true and small: nothing that a user waits for.

Commands that nobody is left to deliver are given up, and those that outlived their execution are settled. Rows that are
settled for long are deleted, a bounded number at a time, so that a backlog never holds up a session.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from services.chassis.clock import Clock
from services.pool.control.commands import FORSAKEN_AFTER, MAX_ATTEMPTS, Commands
from services.pool.upkeep_rows import Forsaken, UpkeepRows

logger = logging.getLogger(__name__)

EVERY = 5.0
RETIRE_EVERY = 60.0
_BATCH = 500
# For each kind of row in one look; what is left then waits for the next one.
_RETIRE_SECONDS = 5.0
# Who has not looked for longer than this does not know what happened meanwhile.
_GAP = 30.0


class Watched:
    """Commands that were seen without anybody to deliver them, and since when on the clock of who looks."""

    def __init__(self) -> None:
        self._since: dict[str, float] = {}
        self._looked_at: float | None = None

    def due(self, now: float, found: Iterable[Forsaken]) -> list[Forsaken]:
        """Those of `found`, which is all there are now, that are to be given up: seen so for `FORSAKEN_AFTER` seconds
        without a gap, or tried as often as they may be."""
        known = self._since if self._looked_at is not None and now - self._looked_at <= _GAP else {}
        found = list(found)
        self._since = {one.command_id: known.get(one.command_id, now) for one in found}
        self._looked_at = now
        return [one for one in found if one.exhausted or now - self._since[one.command_id] >= FORSAKEN_AFTER]


class Upkeep:
    """Each `look` goes through the open commands, each `retire` through what is settled for `retention` seconds; 0
    keeps all of it."""

    def __init__(self, rows: UpkeepRows, commands: Commands, clock: Clock, *, retention: float) -> None:
        self._rows = rows
        self._commands = commands
        self._clock = clock
        self._retention = retention
        self._watched = Watched()

    async def look(self) -> None:
        """One look at the commands that are open."""
        await self._rows.return_commands(attempts=MAX_ATTEMPTS, limit=_BATCH)
        for key in await self._rows.late_commands(_BATCH):
            await self._commands.settle_late(key)
            logger.error("commands outlived their execution", extra={"session": str(key)})
        found = await self._rows.forsaken_commands(attempts=MAX_ATTEMPTS, limit=_BATCH)
        for one in self._watched.due(self._clock.monotonic(), found):
            if await self._commands.give_up(one.key, one.command_id):
                logger.warning("command given up", extra={"session": str(one.key), "command": one.command_id})

    async def retire(self) -> None:
        """Delete settled rows whose time is over."""
        if not self._retention:
            return
        # What names others goes before them.
        for what in ("requests", "commands", "inputs", "gates", "executions", "project_requests"):
            gone, deleted, ends = 0, _BATCH, self._clock.monotonic() + _RETIRE_SECONDS
            while deleted == _BATCH and self._clock.monotonic() < ends:
                deleted = await self._rows.retire(what, self._retention, _BATCH)
                gone += deleted
            if gone:
                logger.info("settled rows deleted", extra={"rows": what, "count": gone})
