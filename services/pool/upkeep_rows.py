"""What the upkeep of the tables asks of them: named SQL in, values out. It decides nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from services.chassis.postgres import Pool, Queries
from services.pool import records
from services.pool.rows import Key


@dataclasses.dataclass(frozen=True, slots=True)
class Forsaken:
    """An open command that nobody is there to deliver. `exhausted`: it was tried as often as it may be."""

    command_id: str
    key: Key
    exhausted: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Figures:
    """What waits, of all sessions: how much, and the seconds of the oldest of it, 0 without one. `executions` are by
    state."""

    executions: Mapping[str, tuple[int, float]]
    commands: int
    command_seconds: float
    inputs: int
    gates: int
    outbox: int
    outbox_seconds: float
    refused: int
    replicas: int


class UpkeepRows:
    """Reads across sessions, and single statements that leave alone what is locked."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._queries = Queries.load("services.pool", "upkeep.sql")

    async def figures(self) -> Figures:
        """What waits now."""
        row = await self._pool.fetchrow(self._queries.figures)
        assert row is not None
        unfinished = await self._pool.fetch(self._queries.unfinished)
        return Figures({found["state"]: (found["count"], found["seconds"]) for found in unfinished}, **dict(row))

    async def return_commands(self, *, attempts: int, limit: int) -> list[Key]:
        """Put commands whose delivery took too long, and that were tried less than `attempts` times, back to PENDING;
        whose they are."""
        return records.keys(await self._pool.fetch(self._queries.return_commands, attempts, limit))

    async def late_commands(self, limit: int) -> list[Key]:
        """Sessions with a command that is open although its execution has ended."""
        return records.keys(await self._pool.fetch(self._queries.late_commands, limit))

    async def forsaken_commands(self, *, attempts: int, limit: int) -> list[Forsaken]:
        """Open commands of executions that no replica drives and nothing ends yet."""
        rows = await self._pool.fetch(self._queries.forsaken_commands, attempts, limit)
        return [Forsaken(str(row["command_id"]), Key(row["project"], row["session"]), row["exhausted"]) for row in rows]

    async def retire(self, what: str, age: float, limit: int) -> int:
        """Delete rows that were settled more than `age` seconds ago, at most `limit`; how many. `what` names the rows
        as the queries do."""
        deleted: int = await self._pool.fetchval(getattr(self._queries, f"retire_{what}"), age, limit)
        return deleted
