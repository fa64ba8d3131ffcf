"""Postgres and Valkey over TLS: settings in their URLs, with roots of their own and certificates for who asks."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import pytest_asyncio

from hearth.secret import Secret
from services.chassis import postgres, valkey
from services.chassis.migrations import migrate
from services.chassis.pubsub import PubSub
from services.chassis.settings import PostgresSettings, StartupError, ValkeySettings
from tests.support.certificates import Certificates
from tests.support.cutter import Cutter
from tests.support.sample.__main__ import PACKAGE

# How a client asks Postgres for TLS.
SSL_REQUEST = bytes.fromhex("0000000804d2162f")


@pytest.fixture
def certificates(scratch: Path) -> Certificates:
    return Certificates(scratch)


@pytest.fixture
def strange(scratch: Path) -> Path:
    """Roots that signed nothing here."""
    (scratch / "elsewhere").mkdir()
    return Certificates(scratch / "elsewhere").ca


class PostgresFront(Cutter):
    """What ends TLS before the Postgres of the tests, whose build has none; as Postgres, it is asked for it first."""

    def __init__(self, target: str, context: ssl.SSLContext) -> None:
        super().__init__(target)
        self._context = context
        self.encrypted = 0

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readexactly(len(SSL_REQUEST)) == SSL_REQUEST
        writer.write(b"S")
        try:
            await writer.start_tls(self._context)
        except OSError:
            return
        self.encrypted += 1
        await super()._pass_on(reader, writer)


@pytest_asyncio.fixture
async def postgres_front(postgres_dsn: str, certificates: Certificates) -> AsyncIterator[tuple[PostgresFront, str]]:
    """It, and the database behind it."""
    parts = urlsplit(postgres_dsn)
    context = context_of(certificates, "postgres")
    async with PostgresFront(f"{parts.hostname}:{parts.port}", context) as front:
        user = parts.netloc.rpartition("@")[0]
        yield front, parts._replace(netloc=f"{user}@{front.address}").geturl()


def context_of(certificates: Certificates, name: str) -> ssl.SSLContext:
    """Of a server that asks who calls, and takes also who does not say."""
    files = certificates.issue(name)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=certificates.ca)
    context.verify_mode = ssl.CERT_OPTIONAL
    context.load_cert_chain(files.certificate, files.key)
    return context


async def test_postgres_by_sslmode_and_roots(
    postgres_front: tuple[PostgresFront, str], certificates: Certificates, strange: Path
) -> None:
    front, base = postgres_front
    mine = certificates.issue("service")
    verified = f"{base}?sslmode=verify-full&sslrootcert="
    dsn = Secret(f"{verified}{certificates.ca}&sslcert={mine.certificate}&sslkey={mine.key}")
    await migrate(dsn, "sample", PACKAGE)
    migrated = front.encrypted
    assert migrated
    async with (
        await postgres.create_pool(PostgresSettings(postgres_dsn=dsn), "tls") as pool,
        pool.acquire() as connection,
    ):
        assert await connection.fetchval("SELECT 1") == 1
    assert front.encrypted > migrated
    wrong = PostgresSettings(postgres_dsn=Secret(f"{verified}{strange}"), postgres_start_timeout=0)
    with pytest.raises(StartupError, match=r"(?i)certificate"):
        await postgres.create_pool(wrong, "tls")


@pytest_asyncio.fixture
async def front(valkey_url: str, certificates: Certificates) -> AsyncIterator[str]:
    """What ends TLS before the Valkey of the tests, which speaks none, and asks who calls."""
    parts = urlsplit(valkey_url)
    async with Cutter(f"{parts.hostname}:{parts.port}", tls=context_of(certificates, "valkey")) as cutter:
        yield parts._replace(scheme="rediss", netloc=cutter.address).geturl()


async def test_both_clients_of_valkey_believe_the_same_server(
    front: str, certificates: Certificates, strange: Path
) -> None:
    mine = certificates.issue("service")
    settings = f"ssl_ca_certs={certificates.ca}&ssl_certfile={mine.certificate}&ssl_keyfile={mine.key}"
    url = Secret(f"{front}?{settings}")
    heard: asyncio.Queue[bytes] = asyncio.Queue()
    async with await valkey.create_client(ValkeySettings(valkey_url=url)) as client:
        bus = await PubSub.connect(url, lambda _, data: heard.put_nowait(data))
        try:
            await bus.subscribe(b"over-tls")
            await client.publish("over-tls", "hello")
            assert await asyncio.wait_for(heard.get(), 10) == b"hello"
        finally:
            await bus.close()


@pytest.mark.parametrize("query", ["", "ssl_ca_certs={strange}"])
async def test_neither_believes_a_server_of_another_authority(front: str, query: str, strange: Path) -> None:
    url = Secret(f"{front}?{query.format(strange=strange)}")
    with pytest.raises(StartupError, match=r"(?i)certificate"):
        await valkey.create_client(ValkeySettings(valkey_url=url, valkey_start_timeout=0))
    with pytest.raises(ssl.SSLError):
        await PubSub.connect(url, lambda _, data: None)


@pytest.mark.parametrize("query", ["ssl_cert_reqs=none", "ssl_ca_certs={ca}&ssl_check_hostname=false"])
async def test_both_take_the_other_settings_too(front: str, query: str, certificates: Certificates) -> None:
    url = Secret(f"{front}?{query.format(ca=certificates.ca)}")
    async with await valkey.create_client(ValkeySettings(valkey_url=url, valkey_start_timeout=0)) as client:
        assert await client.ping()
    bus = await PubSub.connect(url, lambda _, data: None)
    await bus.close()
