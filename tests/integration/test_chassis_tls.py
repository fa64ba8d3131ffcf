"""TLS of a service: certificates renewed while it runs, callers that must show one, and starts that are refused."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest

from hearth.certificates import ends_at
from hearth.channel import open_channel as open_client_channel
from hearth.history.v1 import history_service_pb2, history_service_pb2_grpc
from hearth.tls import Pair, Tls, TlsError
from services.chassis.calls import open_channel
from services.chassis.server import App, started
from services.chassis.settings import ChassisSettings, StartupError
from services.chassis.tls import server_tls
from tests.support.certificates import Certificates, Files
from tests.support.waiting import eventually

HEADS = history_service_pb2.GetHeadsRequest()


class History(history_service_pb2_grpc.HistoryServiceServicer):
    async def GetHeads(self, request: Any, context: Any) -> Any:
        return history_service_pb2.GetHeadsResponse()

    async def StreamEvents(self, request: Any, context: Any) -> Any:
        while True:
            yield history_service_pb2.StreamEventsResponse()
            await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def build(app: App[ChassisSettings]) -> AsyncIterator[None]:
    history_service_pb2_grpc.add_HistoryServiceServicer_to_server(History(), app.server)  # type: ignore[abstract]
    yield


@contextlib.asynccontextmanager
async def serving(files: Files, **changes: Any) -> AsyncIterator[App[ChassisSettings]]:
    given = ChassisSettings(tls_certificate_file=files.certificate, tls_key_file=files.key, **changes)
    async with started(given, "tls", build) as app:
        yield app


@pytest.fixture
def certificates(tmp_path: Path) -> Certificates:
    return Certificates(tmp_path)


def stub(channel: grpc.aio.Channel) -> Any:
    return history_service_pb2_grpc.HistoryServiceStub(channel)


async def shown(address: str, ca: Path) -> str:
    """The certificate that the server shows to a new connection."""

    def look() -> bytes:
        host, port = address.rsplit(":", 1)
        context = ssl.create_default_context(cafile=ca)
        with (
            socket.create_connection((host, int(port)), timeout=10) as plain,
            context.wrap_socket(plain, server_hostname=host) as connection,
        ):
            return connection.getpeercert(binary_form=True) or b""

    return ssl.DER_cert_to_PEM_cert(await asyncio.to_thread(look))


def held(files: Files) -> str:
    return files.certificate.read_text()


async def refused(channel: grpc.aio.Channel) -> str:
    """What a caller is told who does not get through."""
    with pytest.raises(grpc.aio.AioRpcError) as told:
        await stub(channel).GetHeads(HEADS, timeout=5)
    assert told.value.code() is grpc.StatusCode.UNAVAILABLE
    return told.value.details() or ""


async def test_a_renewed_certificate_is_shown_and_open_streams_go_on(certificates: Certificates) -> None:
    files = certificates.issue("server")
    async with (
        serving(files) as app,
        open_channel(app.address, ChassisSettings(tls_ca_file=certificates.ca)) as channel,
    ):
        stream = stub(channel).StreamEvents(history_service_pb2.StreamEventsRequest())
        await stream.read()
        assert await shown(app.address, certificates.ca) == held(files)
        before = held(files)
        certificates.issue("server")
        assert await shown(app.address, certificates.ca) == held(files) != before
        # More than what was on its way already.
        for _ in range(20):
            assert isinstance(await stream.read(), history_service_pb2.StreamEventsResponse)
        stream.cancel()


@pytest.mark.parametrize("damage", ["half", "key of another", "gone"])
async def test_what_cannot_be_used_changes_nothing_and_is_told_once(
    damage: str, certificates: Certificates, caplog: pytest.LogCaptureFixture
) -> None:
    files = certificates.issue("server")
    async with serving(files) as app:
        before = held(files)
        if damage == "half":
            files.certificate.write_text(before[: len(before) // 2])
        elif damage == "gone":
            files.key.unlink()
        else:
            files.key.write_bytes(certificates.issue("other").key.read_bytes())
        for _ in range(3):
            assert await shown(app.address, certificates.ca) == before
        (told,) = (it for it in caplog.records if it.getMessage() == "certificates changed and cannot be used")
        assert str(files.certificate if damage == "half" else files.key) in told.__dict__["cause"]
        certificates.issue("server")
        assert await shown(app.address, certificates.ca) == held(files) != before


@pytest.mark.parametrize(
    ("setting", "content"),
    [
        ("tls_key_file", "other"),
        ("tls_key_file", "nothing"),
        ("tls_certificate_file", "nothing"),
        ("tls_client_ca_file", "nothing"),
        ("tls_ca_file", "nothing"),
    ],
)
async def test_a_start_with_files_that_cannot_be_used_is_refused(
    setting: str, content: str, certificates: Certificates
) -> None:
    files = certificates.issue("server")
    wrong = certificates.directory / "wrong.pem"
    wrong.write_bytes(certificates.issue("other").key.read_bytes() if content == "other" else b"nothing\n")
    given: dict[str, Any] = {"tls_certificate_file": files.certificate, "tls_key_file": files.key, setting: wrong}

    @contextlib.asynccontextmanager
    async def calling(app: App[ChassisSettings]) -> AsyncIterator[None]:
        async with open_channel(app.address, app.settings), build(app):
            yield

    with pytest.raises(StartupError, match=f"HEARTH_{setting.upper()} is wrong: {wrong}") as refused:
        async with started(ChassisSettings(**given), "tls", calling):
            pass
    assert refused.value.exit_code == 2


async def test_callers_have_to_show_a_certificate_of_the_right_authority(
    certificates: Certificates, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere").mkdir()
    strangers = Certificates(tmp_path / "elsewhere")
    server, mine = certificates.issue("server"), certificates.issue("caller", hosts=())
    theirs = strangers.issue("stranger", hosts=())
    async with serving(server, tls_client_ca_file=certificates.ca) as app:

        def as_caller(files: Files | None) -> grpc.aio.Channel:
            certificate, key = (files.certificate, files.key) if files is not None else (None, None)
            tls = Tls.of_files(certificates.ca, certificate_file=certificate, key_file=key)
            return open_client_channel(app.address, tls=tls, options=[("grpc.enable_retries", 0)])

        async with as_caller(mine) as channel:
            await stub(channel).GetHeads(HEADS, timeout=10)
        async with as_caller(None) as channel:
            await refused(channel)
        async with as_caller(theirs) as channel:
            await refused(channel)
        # A service shows the certificate that it serves with.
        given = ChassisSettings(
            tls_ca_file=certificates.ca, tls_certificate_file=server.certificate, tls_key_file=server.key
        )
        async with open_channel(app.address, given) as channel:
            await stub(channel).GetHeads(HEADS, timeout=10)


async def test_a_service_shows_its_renewed_certificate_and_keeps_its_streams(certificates: Certificates) -> None:
    """Its channels live as long as the process, and gRPC reads the certificate of a channel once."""
    server, mine = certificates.issue("server"), certificates.issue("service")
    given = ChassisSettings(tls_ca_file=certificates.ca, tls_certificate_file=mine.certificate, tls_key_file=mine.key)
    async with serving(server, tls_client_ca_file=certificates.ca) as app, open_channel(app.address, given) as channel:
        calls = stub(channel)
        stream = calls.StreamEvents(history_service_pb2.StreamEventsRequest())
        await stream.read()
        # Both sides move to another authority: who still shows the former certificate gets no connection.
        certificates.authority = Certificates(certificates.directory).authority
        certificates.issue("server")
        certificates.issue("service")
        await calls.GetHeads(HEADS, timeout=10)
        for _ in range(20):
            await stream.read()
        links = channel._links  # type: ignore[attr-defined]
        assert len(links._former) == 1
        stream.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await stream.read()
        await eventually(lambda: not links._former)
        await calls.GetHeads(HEADS, timeout=10)


async def test_replicas_in_a_list_share_one_name(certificates: Certificates) -> None:
    server = certificates.issue("server", hosts=("127.0.0.1", "shared"))
    async with serving(server) as one, serving(server) as two:
        both = f"{one.address},{two.address}"
        async with open_channel(both, ChassisSettings(tls_ca_file=certificates.ca)) as channel:
            await stub(channel).GetHeads(HEADS, timeout=10)
        apart = both.replace(one.address, f"127.0.0.2:{one.address.rpartition(':')[2]}")
        with pytest.raises(ValueError, match="HEARTH_TLS_SERVER_NAME"):
            open_client_channel(apart, tls=Tls.of_files(certificates.ca))
        with pytest.raises(ValueError, match="HEARTH_TLS_SERVER_NAME"):
            ChassisSettings(tls_ca_file=certificates.ca, history_address=apart)
        named = ChassisSettings(tls_ca_file=certificates.ca, tls_server_name="shared")
        async with open_channel(both, named) as channel:
            await stub(channel).GetHeads(HEADS, timeout=10)
    elsewhere = certificates.issue("elsewhere", hosts=("pool",))
    async with serving(elsewhere) as app:
        given = ChassisSettings(tls_ca_file=certificates.ca)
        async with open_channel(app.address, given, server_name="pool") as channel:
            await stub(channel).GetHeads(HEADS, timeout=10)
        async with open_channel(app.address, given, retries=False) as channel:
            assert "Hostname Verification" in await refused(channel)


async def test_metrics_are_served_by_https_where_that_is_set(certificates: Certificates, tmp_path: Path) -> None:
    files = certificates.issue("server")
    told = tmp_path / "metrics"
    wanted = {"metrics_listen": "127.0.0.1:0", "metrics_address_file": told}
    context = ssl.create_default_context(cafile=certificates.ca)
    async with serving(files, **wanted, metrics_tls=True), aiohttp.ClientSession() as session:
        address = told.read_text()
        for _ in range(2):
            async with session.get(f"https://{address}/metrics", ssl=context) as answer:
                assert answer.status == 200
            assert await shown(address, certificates.ca) == held(files)
            certificates.issue("server")
        with pytest.raises(aiohttp.ClientError):
            await session.get(f"http://{address}/metrics")
    async with (
        serving(files, **wanted),
        aiohttp.ClientSession() as session,
        session.get(f"http://{told.read_text()}/metrics") as answer,
    ):
        assert answer.status == 200


def test_the_end_that_is_told_is_that_of_the_certificate_in_use(certificates: Certificates) -> None:
    files = certificates.issue("server", days=3)
    tls = server_tls(ChassisSettings(tls_certificate_file=files.certificate, tls_key_file=files.key))
    assert tls is not None

    def held_until() -> float:
        return ends_at(Pair(files.certificate.read_bytes(), files.key.read_bytes())).timestamp()

    before = held_until()
    assert tls.ends() == before
    certificates.issue("server", days=5)
    assert tls.ends() == held_until() > before
    now = tls.ends()
    files.key.write_text("none")
    assert tls.ends() == now


def test_what_needs_a_certificate_says_so(certificates: Certificates) -> None:
    for setting in ({"tls_client_ca_file": certificates.ca}, {"metrics_tls": True}):
        with pytest.raises(ValueError, match="needs HEARTH_TLS_CERTIFICATE_FILE"):
            ChassisSettings(**setting)


def test_a_client_reads_its_files_from_the_environment(certificates: Certificates) -> None:
    mine = certificates.issue("caller")
    assert Tls.from_environment({}) is None
    given = {"HEARTH_TLS_CA_FILE": str(certificates.ca), "HEARTH_TLS_SERVER_NAME": "pool"}
    only = Tls.from_environment(given)
    assert only == Tls(certificates.ca.read_bytes(), server_name="pool")
    given |= {"HEARTH_TLS_CERTIFICATE_FILE": str(mine.certificate)}
    with pytest.raises(TlsError, match="go together"):
        Tls.from_environment(given)
    given |= {"HEARTH_TLS_KEY_FILE": str(mine.key)}
    both = Tls.from_environment(given)
    assert both is not None
    assert both.pair is not None
    assert both.pair.private_key == mine.key.read_bytes()
    assert "PRIVATE" not in repr(both)
    given["HEARTH_TLS_CA_FILE"] = str(mine.key)
    with pytest.raises(TlsError, match="holds no certificates"):
        Tls.from_environment(given)
    with pytest.raises(StartupError, match="HEARTH_TLS_CA_FILE"):
        open_channel("127.0.0.1:1", ChassisSettings(tls_ca_file=mine.key))
