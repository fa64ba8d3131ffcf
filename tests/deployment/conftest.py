"""A deployment of `hearth init`: its secrets, its services in processes, its stores."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import asyncpg
import pytest
from dotenv import dotenv_values

from hearth.embedded import daemons
from tests.deployment.placed import Placed, postgres_of, services_of, valkey_of
from tests.support.cli import Hearth

Deployed = Callable[..., AbstractAsyncContextManager[Placed]]


@pytest.fixture
async def deployment(scratch: Path, request: pytest.FixtureRequest) -> Path:
    """A directory with what `hearth init` makes, with the options that a test parametrizes it by."""
    made = await Hearth(scratch).run("init", str(scratch), *getattr(request, "param", ()))
    assert made.code == 0, made.stderr
    return scratch


@pytest.fixture
def deployed(deployment: Path, postgres_dsn: str) -> Deployed:
    """`async with deployed(HEARTH_POOL_REPLICAS="2") as placed`: stores as the file has them, and no service yet.

    The user of the database is a plain one that owns it, as managed servers have them.
    """

    @asynccontextmanager
    async def opened(
        *, path: str = str(Path(sys.executable).parent), account: int | None = None, **changes: str
    ) -> AsyncIterator[Placed]:
        services = services_of(deployment / ".env", **changes)
        given = services["pool"].environment["HEARTH_POSTGRES_DSN"]
        async with valkey_of(services["valkey"], deployment / "valkey") as valkey_url:
            admin = await asyncpg.connect(postgres_dsn)
            try:
                name = await admin.fetchval("SELECT current_database()")
                if not await admin.fetchval("SELECT count(*) FROM pg_roles WHERE rolname = 'hearth'"):
                    await admin.execute("CREATE ROLE hearth LOGIN")
                await admin.execute(f'ALTER DATABASE "{name}" OWNER TO hearth')
            finally:
                await admin.close()
            stores = {"HEARTH_POSTGRES_DSN": postgres_of(postgres_dsn, given), "HEARTH_VALKEY_URL": valkey_url}
            placed = Placed(
                deployment, services, f"{path}:/usr/local/bin:/usr/bin:/bin", account=account, stores=stores
            )
            try:
                yield placed
            except BaseException as error:
                for container in placed.containers:
                    error.add_note(f"--- {container.name}\n{daemons.tail(container.log)}")
                await placed.stop(well=False)
                raise
            await placed.stop()

    return opened


def operator(placed: Placed) -> Hearth:
    """The program in the hands of who made the deployment."""
    token = dotenv_values(placed.directory / ".env")["HEARTH_OPERATOR_TOKEN"]
    addresses = {
        f"HEARTH_{name.upper()}_ADDRESS": placed.address(name) for name in ("pool", "history", "relay", "sandbox")
    }
    return Hearth(placed.directory / "nowhere", {**addresses, **tls_of(placed), "HEARTH_TOKEN": str(token)})


def tls_of(placed: Placed) -> dict[str, str]:
    """The environment of the operator of a deployment with certificates; empty without."""
    own = placed.directory / "deploy" / "tls" / "operator"
    names = {"CA_FILE": "ca.pem", "CERTIFICATE_FILE": "certificate.pem", "KEY_FILE": "key.pem"}
    return {f"HEARTH_TLS_{name}": str(own / file) for name, file in names.items()} if own.exists() else {}
