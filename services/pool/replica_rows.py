"""What pool processes write down for each other, as seen from Python: named SQL in, values out. It decides nothing."""

from __future__ import annotations

from collections.abc import Iterable

from services.chassis.postgres import Pool, Queries
from services.pool import records
from services.pool.observing import Beat, Driven
from services.pool.rows import Key
from services.pool.runners import Standing, Unpicked

_BATCH = 500


class ReplicaRows:
    """The rows of replicas, and what they have to do with sessions."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._queries = Queries.load("services.pool", "replicas.sql")

    async def register(self, holder: str, address: str, place: str, beats: int) -> None:
        """Say that a replica is there, at a counter that it has not had before."""
        await self._pool.execute(self._queries.register, holder, address, place, beats)

    async def beat(self, holder: str, beats: int, *, draining: bool, driving: Iterable[Key], entries: int) -> bool:
        """Say that a replica lives, and what it does; False when it has no row any more."""
        listed = [str(key) for key in driving]
        return await self._pool.fetchval(self._queries.beat, holder, beats, draining, listed, entries) is not None

    async def leave(self, holder: str) -> None:
        """Remove a replica that ended."""
        await self._pool.execute(self._queries.leave, holder)

    async def condemn(self, holder: str, beats: int) -> bool:
        """Remove a replica that died at this counter; False when it is there no more, or its counter has moved."""
        return await self._pool.fetchval(self._queries.condemn, holder, beats) is not None

    async def beats(self, holder: str) -> dict[str, Beat]:
        """Every replica but `holder`."""
        rows = await self._pool.fetch(self._queries.beats, holder)
        return {str(row["holder"]): Beat(row["beats"], frozenset(map(_key, row["driving"]))) for row in rows}

    async def in_place(self, place: str, address: str, holder: str) -> dict[str, int]:
        """Counters of the replicas that were where `holder` is now."""
        rows = await self._pool.fetch(self._queries.in_place, place, address, holder)
        return {str(row["holder"]): row["beats"] for row in rows}

    async def address(self, holder: str) -> str | None:
        """Where a replica can be reached; None when it has no row."""
        address: str | None = await self._pool.fetchval(self._queries.address, holder)
        return address

    async def driven(self, holder: str) -> list[Driven]:
        """What every replica but `holder` has picked up, and nothing has ended."""
        rows = await self._pool.fetch(self._queries.driven, holder)
        return [
            Driven(Key(row["project"], row["session"]), str(row["execution_id"]), row["epoch"], str(row["driver"]))
            for row in rows
        ]

    async def standing(self, key: Key) -> Standing | None:
        """Who has a session and what it does; None when there is none, or it was deleted."""
        row = await self._pool.fetchrow(self._queries.standing, *key)
        if row is None:
            return None
        return Standing(
            records.text(row["holder"]),
            row["epoch"],
            records.text(row["execution_id"]),
            records.text(row["driver"]),
            bool(row["pending"]),
            bool(row["ending"]),
        )

    async def holder(self, key: Key) -> str | None:
        """The replica that has a session, also one that was deleted."""
        return records.text(await self._pool.fetchval(self._queries.holder, *key))

    async def held(self, holder: str) -> set[Key]:
        """The sessions that a replica has by their rows."""
        return set(records.keys(await self._pool.fetch(self._queries.held, holder)))

    async def release_held(self, holder: str) -> int:
        """Say of some of the sessions of a replica that nobody has them; of how many. It drives none of them."""
        return len(await self._pool.fetch(self._queries.release_held, holder, _BATCH))

    async def unpicked(self, limit: int) -> list[Unpicked]:
        """Executions that wait to be picked up."""
        return [
            Unpicked(Key(row["project"], row["session"]), str(row["execution_id"]), records.text(row["holder"]))
            for row in await self._pool.fetch(self._queries.unpicked, limit)
        ]

    async def commands_here(self, holder: str, limit: int) -> list[Key]:
        """Sessions that a replica drives and that have a command which waits."""
        return records.keys(await self._pool.fetch(self._queries.commands_here, holder, limit))

    async def facts_here(self, holder: str, age: float, limit: int) -> list[Key]:
        """Sessions with facts that this replica has to tell: it drives them, or nobody told them for `age` seconds."""
        return records.keys(await self._pool.fetch(self._queries.facts_here, holder, age, limit))


def _key(text: str) -> Key:
    project, _, session = text.partition("/")
    return Key(project, session)
