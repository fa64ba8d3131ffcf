"""Credentials in their rows: put, forgotten, listed by name, and opened for a turn that starts."""

from __future__ import annotations

import hashlib
import hmac
import logging
from datetime import datetime

import asyncpg

from hearth.secret import Secret
from hearth.session.v1 import session_pb2 as sessions
from services.chassis.clock import Clock
from services.chassis.errors import AlreadyExists, FailedPrecondition, HearthError, invalid
from services.chassis.postgres import Connection, Pool, Queries
from services.pool.credentials import Binding, Credential, Given, bindings, place_of, refusal
from services.pool.sealing import NotOpened, Sealer

logger = logging.getLogger(__name__)

_PUT = "PutCredential"
_DELETE = "DeleteCredential"
_RESEALED_AT_ONCE = 100


class Credentials:
    """The credentials of all projects. Without a `sealer` none can be put or given; they can be listed and deleted."""

    def __init__(self, pool: Pool, sealer: Sealer | None, clock: Clock) -> None:
        self._pool = pool
        self._queries = Queries.load("services.pool")
        self._sealer = sealer
        self._clock = clock

    async def put(
        self, project: str, request_id: str, name: str, value: Secret, expires_at: datetime | None
    ) -> Credential | None:
        """Store a value; the credential as it is now, None when a repeated request finds it deleted since."""
        sealer = self._sealer
        if sealer is None:
            raise key_missing()
        content = _content(_PUT, name, value.reveal(), expires_at.isoformat() if expires_at is not None else "")
        async with self._pool.acquire() as connection, connection.transaction():
            repeated = await self._accept(connection, project, request_id, _PUT, sealer.mark(content))
            if repeated is not None:
                if repeated["method"] != _PUT or not sealer.marked(repeated["fingerprint"], content):
                    raise _reused(repeated["method"])
                return await self._find(connection, project, name)
            if expires_at is not None and expires_at <= self._clock.now():
                raise invalid("expires_at", "must be in the future")
            # Locks the name also where it has no row yet.
            await connection.execute(self._queries.lock_credential, f"hearth/credential/{project}/{name}")
            before = await self._find(connection, project, name)
            generation: int = await connection.fetchval(self._queries.next_generation)
            value_generation = generation
            if before is not None and _same(sealer, project, before, value):
                value_generation = before.value_generation
            sealed = sealer.seal(value.reveal().encode(), place_of(project, name, value_generation))
            row = await connection.fetchrow(
                self._queries.put_credential, project, name, generation, value_generation, sealed, expires_at
            )
        assert row is not None
        logger.info("credential stored", extra={"project": project, "credential": name, "generation": generation})
        return _credential(row)

    async def delete(self, project: str, request_id: str, name: str) -> None:
        """Forget a credential; one that is not there is forgotten already."""
        mark = hashlib.sha256(_content(_DELETE, name)).digest()
        async with self._pool.acquire() as connection, connection.transaction():
            repeated = await self._accept(connection, project, request_id, _DELETE, mark)
            if repeated is not None:
                if repeated["method"] != _DELETE or repeated["fingerprint"] != mark:
                    raise _reused(repeated["method"])
                return
            await connection.execute(self._queries.delete_credential, project, name)
        logger.info("credential deleted", extra={"project": project, "credential": name})

    async def listed(self, project: str, after: str, limit: int) -> list[Credential]:
        """Credentials by name, after one."""
        rows = await self._pool.fetch(self._queries.credentials, project, after, limit)
        return [_credential(row) for row in rows]

    async def given(self, project: str, spec: sessions.SessionSpec) -> Given:
        """The values of everything that a spec binds.

        Raises `HearthError`: CREDENTIAL_NOT_FOUND and CREDENTIAL_EXPIRED name it, SECRET_KEY_MISSING.
        """
        wanted = bindings(spec)
        if not wanted:
            return Given()
        rows = await self._pool.fetch(
            self._queries.credentials_by_name, project, sorted({one.credential for one in wanted})
        )
        found = {row["name"]: _credential(row) for row in rows}
        ends = {name: one.expires_at for name, one in found.items()}
        refused = refusal(wanted, ends, self._clock.now())
        if refused is not None:
            raise refused
        return Given.of(self._opened(project, binding, found[binding.credential]) for binding in wanted)

    async def seal_anew(self) -> None:
        """Seal what was sealed with an older key with the one that seals now."""
        sealer = self._sealer
        if sealer is None:
            return
        done, unreadable, after = 0, 0, ("", "")
        while rows := await self._pool.fetch(self._queries.sealed_values, *after, _RESEALED_AT_ONCE):
            for row in rows:
                if sealer.newest(row["sealed"]):
                    continue
                place = place_of(row["project"], row["name"], row["value_generation"])
                try:
                    sealed = sealer.seal(sealer.open(row["sealed"], place), place)
                except NotOpened:
                    unreadable += 1
                    continue
                await self._pool.execute(self._queries.seal_anew, row["project"], row["name"], row["sealed"], sealed)
                done += 1
            after = (rows[-1]["project"], rows[-1]["name"])
        if done:
            logger.info("credentials sealed with the newest key", extra={"credentials": done})
        if unreadable:
            logger.error("credentials are sealed with a key that is not there", extra={"credentials": unreadable})

    def _opened(self, project: str, binding: Binding, row: Credential) -> tuple[Binding, int, Secret, datetime | None]:
        if self._sealer is None:
            raise key_missing()
        try:
            value = self._sealer.open(row.sealed, place_of(project, row.name, row.value_generation))
        except NotOpened as error:
            raise FailedPrecondition(
                f"the credential {row.name!r} cannot be opened: {error}",
                reason="SECRET_KEY_MISSING",
                metadata={"credential": row.name},
            ) from None
        return binding, row.value_generation, Secret(value.decode()), row.expires_at

    async def _accept(
        self, connection: Connection, project: str, request_id: str, method: str, mark: bytes
    ) -> asyncpg.Record | None:
        """Note a request; None when it is a new one, else what was noted before."""
        fresh = await connection.fetchval(self._queries.accept_project_request, project, request_id, method, mark)
        if fresh is not None:
            return None
        row: asyncpg.Record | None = await connection.fetchrow(self._queries.project_request, project, request_id)
        assert row is not None, "requests are never deleted"
        return row

    async def _find(self, connection: Connection, project: str, name: str) -> Credential | None:
        row = await connection.fetchrow(self._queries.credential, project, name)
        return _credential(row) if row is not None else None


def key_missing() -> HearthError:
    """The answer where nothing can be sealed or opened."""
    return FailedPrecondition(
        "HEARTH_SECRET_KEY is not set for the pool, so credentials can be neither stored nor used;"
        " `hearth credentials key` makes one",
        reason="SECRET_KEY_MISSING",
    )


def _same(sealer: Sealer, project: str, before: Credential, value: Secret) -> bool:
    try:
        known = sealer.open(before.sealed, place_of(project, before.name, before.value_generation))
    except NotOpened:
        return False
    return hmac.compare_digest(known, value.reveal().encode())


def _content(*parts: str) -> bytes:
    return b"".join(len(part.encode()).to_bytes(4, "big") + part.encode() for part in parts)


def _reused(method: str) -> HearthError:
    return AlreadyExists(
        "request_id was used before in this project for another request; use a new one",
        reason="REQUEST_ID_REUSED",
        metadata={"method": method},
    )


def _credential(row: asyncpg.Record) -> Credential:
    return Credential(
        row["name"],
        row["generation"],
        row["value_generation"],
        row["sealed"],
        row["expires_at"],
        row["updated_at"],
    )
