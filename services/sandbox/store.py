"""The rows of this service in Postgres. Every statement commits by itself; nothing is held between two of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import asyncpg

from hearth.secret import Secret
from services.chassis.postgres import Pool, Queries
from services.sandbox import states
from services.sandbox.claims import Claim, Reading, Standing
from services.sandbox.rows import Key, Row, View
from services.sandbox.states import Desired, How, Observed, Tenure

# Any number that no other part of this database uses; two deployments have two databases.
_RECONCILER_LOCK = 0x48454152_53424F58


@dataclass(frozen=True, slots=True)
class Renewal:
    """A claim that its holder still needs; `active` as the holder sees it."""

    key: Key
    claim: Claim
    active: bool


@dataclass(frozen=True, slots=True)
class Renewed:
    """What became of a renewal: `sandbox_id` is None where nothing was renewed. `refresh`: the provider is due to be
    told that the sandbox is in use, and this call is the one that tells it."""

    standing: Standing | None
    sandbox_id: str | None
    provider: str = ""
    provider_id: str = ""
    refresh: bool = False


@dataclass(frozen=True, slots=True)
class Position:
    """Where a page ended."""

    created_at: datetime
    sandbox_id: str


@dataclass(frozen=True, slots=True)
class Present:
    """How many sandboxes of one provider are in one state and tier, and how many of them are overdue."""

    provider: str
    observed: Observed
    tier: str
    count: int
    overdue: int


@dataclass(frozen=True, slots=True)
class TierTotal:
    """What one tier of one provider used: present count, seconds since the deployment began."""

    provider: str
    tier: str
    count: int
    seconds: float


class Store:
    """Reads and compare-and-sets. A method that returns None instead of a row lost a race: read again, decide again."""

    def __init__(self, pool: Pool, worker: str) -> None:
        """`worker` is the uuid of this process, written into the rows that it works on."""
        self._pool = pool
        self._sql = Queries.load("services.sandbox")
        self.worker = worker

    async def deployment_id(self) -> str:
        """The uuid that this database's instances are labelled with."""
        return str(await self._pool.fetchval(self._sql.deployment))

    async def admit(self, key: Key, claim: Claim, holder: str) -> View:
        """The session as it was, and `claim` made its standing one if it is higher and open."""
        record = await self._pool.fetchrow(self._sql.admit, *key, *claim, holder)
        assert record is not None
        return _view(record)

    async def attach(self, before: Row, after: Row) -> Row | None:
        """`admit` the claim of `after` and move its running sandbox to it, in one statement.

        None: the row is not at the version of `before` any more, or the claim did not become the standing one. It may
        have become so even when the row did not move.
        """
        states.check(before.observed, after.observed)
        assert after.key is not None
        record = await self._pool.fetchrow(
            self._sql.attach,
            *after.key,
            *after.claim,
            after.holder,
            before.sandbox_id,
            before.version,
            after.token and after.token.reveal(),
            after.url,
            json.dumps(dict(after.headers)),
        )
        return _row(record) if record is not None else None

    async def view(self, key: Key) -> View:
        """The session as it is."""
        record = await self._pool.fetchrow(self._sql.view, *key)
        assert record is not None
        return _view(record)

    async def close_claims(self, key: Key, claim: Claim) -> None:
        """Close every claim up to `claim`. From here on an Acquire under one of them is refused or undone."""
        await self._pool.execute(self._sql.close_claims, *key, *claim)

    async def get(self, sandbox_id: str) -> Row | None:
        """One sandbox, whatever its state."""
        record = await self._pool.fetchrow(self._sql.get, sandbox_id)
        return _row(record) if record is not None else None

    async def insert(self, row: Row, *, deadline: float) -> Row | None:
        """Write the intent to create, worked on by this process for `deadline` seconds. None: the session has a
        sandbox, or the claim does not stand any more."""
        assert row.key is not None
        record = await self._pool.fetchrow(
            self._sql.insert,
            row.sandbox_id,
            *row.key,
            row.provider,
            row.agent,
            row.fingerprint,
            row.daemon_fingerprint,
            row.holder,
            *row.claim,
            self.worker,
            deadline,
            row.network,
        )
        return _row(record) if record is not None else None

    async def insert_orphan(self, row: Row) -> Row | None:
        """Write down an instance that has no living row. None: it has a row by now."""
        key = row.key or (None, None)
        record = await self._pool.fetchrow(
            self._sql.insert_orphan, row.sandbox_id, *key, row.provider, row.provider_id, row.last_error
        )
        return _row(record) if record is not None else None

    async def gone(self, sandbox_ids: Sequence[str]) -> set[str]:
        """Which of these sandboxes were seen gone."""
        return {record["sandbox_id"] for record in await self._pool.fetch(self._sql.gone, list(sandbox_ids))}

    async def move(
        self,
        before: Row,
        after: Row,
        *,
        deadline: float = 0.0,
        while_open: bool = False,
        while_highest: bool = False,
        renewals: int | None = None,
    ) -> Row | None:
        """Change the row from `before` to `after`, if it is still at the version of `before`.

        `deadline`: seconds that `after.worker` has. `while_open`: only if the claim of `after` is not closed;
        `while_highest`: and no higher one stands. `renewals`: only at this count. Raises `IllegalChange` for what the
        table of states does not have.
        """
        states.check(before.observed, after.observed)
        record = await self._pool.fetchrow(
            self._sql.move,
            before.sandbox_id,
            before.version,
            after.provider_id,
            after.daemon_fingerprint,
            after.desired,
            after.observed,
            after.tenure,
            after.holder,
            *after.claim,
            after.how,
            after.token and after.token.reveal(),
            after.url,
            json.dumps(dict(after.headers)),
            after.worker,
            after.last_error,
            deadline,
            while_open or while_highest,
            renewals,
            while_highest,
            after.network,
        )
        return _row(record) if record is not None else None

    async def renew(self, holder: str, renewals: Sequence[Renewal], *, refresh_after: float) -> list[Renewed]:
        """Renew all of them; one result for each, in order."""
        records = await self._pool.fetch(
            self._sql.renew,
            holder,
            [renewal.key.project for renewal in renewals],
            [renewal.key.session for renewal in renewals],
            [renewal.claim.epoch for renewal in renewals],
            [renewal.claim.attempt for renewal in renewals],
            [renewal.active for renewal in renewals],
            refresh_after,
        )
        return [
            Renewed(
                _standing(record),
                _text(record["sandbox_id"]),
                record["provider"] or "",
                record["provider_id"] or "",
                record["refresh"],
            )
            for record in records
        ]

    async def leases(self) -> list[Reading]:
        """The leases of all sandboxes that are held and that nobody works on."""
        records = await self._pool.fetch(self._sql.leases)
        return [Reading(r["sandbox_id"], Claim(r["claim_epoch"], r["claim_attempt"]), r["renewals"]) for r in records]

    async def hold_worker_lock(self, connection: asyncpg.Connection[asyncpg.Record]) -> bool:
        """Take the lock that shows that this process lives; it is the connection's. False: an older one has it."""
        return bool(await connection.fetchval(self._sql.hold_worker_lock, self.worker))

    async def workers_without_lock(self) -> list[str]:
        """Other processes that have work and do not show that they live."""
        return [record["worker"] for record in await self._pool.fetch(self._sql.workers_without_lock, self.worker)]

    async def expire_workers(self, workers: Sequence[str]) -> list[str]:
        """End the deadlines of these workers, unless one shows that it lives; the sandboxes that they worked on."""
        return [record["sandbox_id"] for record in await self._pool.fetch(self._sql.expire_workers, list(workers))]

    async def not_gone(self, provider: str) -> list[Row]:
        """All sandboxes of a provider that were not seen gone, oldest first."""
        return [_row(record) for record in await self._pool.fetch(self._sql.not_gone, provider)]

    async def least_recently_parked(self, provider: str) -> Row | None:
        """The parked sandbox that was not used for the longest time."""
        record = await self._pool.fetchrow(self._sql.least_recently_parked, provider)
        return _row(record) if record is not None else None

    async def parked_beyond(self, provider: str, cap: int) -> list[Row]:
        """Parked sandboxes that hold no warm slot up to number `cap`."""
        return [_row(record) for record in await self._pool.fetch(self._sql.parked_beyond, provider, cap)]

    async def breaker(self, provider: str) -> int | None:
        """How many unknown instances tripped the breaker of a provider; None: it is not tripped."""
        return await self._pool.fetchval(self._sql.breaker, provider)  # type: ignore[no-any-return]

    async def trip_breaker(self, provider: str, unknown: int) -> None:
        """Touch no unknown instance of this provider until `reset_breaker`."""
        await self._pool.execute(self._sql.trip_breaker, provider, unknown)

    async def reset_breaker(self, provider: str) -> None:
        """A person has looked, or nothing is unknown any more."""
        await self._pool.execute(self._sql.reset_breaker, provider)

    async def page(
        self,
        *,
        project: str | None,
        session: str | None,
        tenure: str | None,
        include_gone: bool,
        after: Position | None,
        limit: int,
    ) -> list[Row]:
        """Sandboxes, oldest first; None matches any."""
        position = (after.created_at, after.sandbox_id) if after is not None else (None, None)
        records = await self._pool.fetch(self._sql.page, project, session, tenure, include_gone, *position, limit)
        return [_row(record) for record in records]

    async def ensure_slots(self, provider: str, cap: int) -> None:
        """There are warm slots 1 to `cap`."""
        await self._pool.execute(self._sql.ensure_slots, provider, cap)

    async def take_slot(self, provider: str, cap: int, sandbox_id: str) -> bool:
        """Take a free warm slot up to number `cap` for the sandbox; True if it has one now."""
        try:
            return await self._pool.fetchval(self._sql.take_slot, provider, cap, sandbox_id) is not None
        except asyncpg.UniqueViolationError:
            # Another call for it took one while this statement ran.
            return True

    async def return_slot(self, sandbox_id: str) -> None:
        """Give back the slot of a sandbox that was not parked after all."""
        await self._pool.execute(self._sql.return_slot, sandbox_id)

    async def slots_used(self) -> dict[str, int]:
        """Taken warm slots by provider."""
        return {record["provider"]: record["used"] for record in await self._pool.fetch(self._sql.slots)}

    async def present(self) -> list[Present]:
        """What there is of all projects, without what is gone."""
        records = await self._pool.fetch(self._sql.present)
        return [Present(r["provider"], Observed(r["observed"]), r["tier"], r["count"], r["overdue"]) for r in records]

    async def breakers(self) -> dict[str, int]:
        """How many unknown instances tripped the breaker of a provider, of those where it is tripped."""
        return {record["provider"]: record["unknown"] for record in await self._pool.fetch(self._sql.breakers)}

    async def usage(self, project: str | None) -> list[TierTotal]:
        """Totals of all tiers that anything was ever in."""
        records = await self._pool.fetch(self._sql.usage, project)
        return [TierTotal(r["provider"], r["tier"], r["count"], float(r["seconds"])) for r in records]

    async def orphans(self, project: str | None) -> tuple[int, datetime]:
        """How many orphans were not seen gone yet, and the database's time."""
        record = await self._pool.fetchrow(self._sql.orphans, project)
        assert record is not None
        return record["orphans"], record["as_of"]

    async def remove_old(self, seconds: float) -> int:
        """Remove the rows of sandboxes gone for that long; their usage is kept. Returns how many."""
        return int(await self._pool.fetchval(self._sql.remove_old, seconds))

    @asynccontextmanager
    async def reconciling(self) -> AsyncIterator[bool]:
        """True inside for one process at a time. It only saves double work."""
        async with self._pool.acquire() as connection:
            mine = await connection.fetchval("SELECT pg_try_advisory_lock($1)", _RECONCILER_LOCK)
            try:
                yield mine
            finally:
                if mine:
                    await connection.execute("SELECT pg_advisory_unlock($1)", _RECONCILER_LOCK)


def _view(record: asyncpg.Record) -> View:
    row = _row(record) if record["sandbox_id"] is not None else None
    return View(_standing(record), row, record["admitted"])


def _standing(record: asyncpg.Record) -> Standing | None:
    if record["standing_epoch"] is None:
        return None
    return Standing(
        Claim(record["standing_epoch"], record["standing_attempt"]),
        _text(record["standing_holder"]) or "",
        Claim(record["closed_epoch"], record["closed_attempt"]),
    )


def _row(record: asyncpg.Record) -> Row:
    headers: Mapping[str, Any] = json.loads(record["endpoint_headers"])
    return Row(
        sandbox_id=str(record["sandbox_id"]),
        key=Key(record["project"], record["session"]) if record["project"] is not None else None,
        provider=record["provider"],
        provider_id=record["provider_id"],
        agent=record["agent"],
        fingerprint=record["fingerprint"],
        daemon_fingerprint=record["daemon_fingerprint"],
        desired=Desired(record["desired"]),
        observed=Observed(record["observed"]),
        tenure=Tenure(record["tenure"]),
        holder=_text(record["holder"]),
        claim=Claim(record["claim_epoch"], record["claim_attempt"]),
        how=How(record["how"]) if record["how"] is not None else None,
        token=Secret(record["token"]) if record["token"] is not None else None,
        url=record["endpoint_url"],
        headers=headers,
        version=record["version"],
        worker=_text(record["worker"]),
        overdue=record["overdue"],
        renewals=record["renewals"],
        created_at=record["created_at"],
        changed_at=record["changed_at"],
        last_error=record["last_error"],
        network=record["network"],
    )


def _text(value: object) -> str | None:
    return str(value) if value is not None else None
