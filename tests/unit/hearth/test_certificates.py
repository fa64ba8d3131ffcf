"""Certificates that are made here: whom they are for, when they are made anew, and how a command finds them."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import typer

from hearth.certificates import AUTHORITY_VALID, Authority, ends_at
from hearth.channel import certificate_name
from hearth.cli import reaching
from hearth.cli.words import tls_hint
from hearth.embedded import certificates
from hearth.embedded.records import ProcessRecord, StackRecord, TlsFiles
from hearth.secret import Secret
from hearth.tls import TlsError, read_pair, read_roots

NOW = datetime(2030, 1, 1, tzinfo=UTC)


def stack_pair(root: Path) -> tuple[bytes, bytes]:
    return read_pair(root / "tls" / "stack.pem", root / "tls" / "stack.key")


def test_keys_are_for_their_owner(tmp_path: Path) -> None:
    certificates.ensure(tmp_path, NOW)
    assert (tmp_path / "tls").stat().st_mode & 0o777 == 0o700
    for name in ("ca.key", "stack.key"):
        assert (tmp_path / "tls" / name).stat().st_mode & 0o777 == 0o600


def test_a_certificate_of_a_stack_is_made_anew_before_it_ends(tmp_path: Path) -> None:
    assert certificates.ensure(tmp_path, NOW)
    first, ca = stack_pair(tmp_path), read_roots(tmp_path / "tls" / "ca.pem")
    late = NOW + certificates.VALID - certificates.RENEWED_BEFORE
    assert not certificates.ensure(tmp_path, late - timedelta(hours=1))
    assert stack_pair(tmp_path) == first
    assert certificates.ensure(tmp_path, late + timedelta(hours=1))
    assert stack_pair(tmp_path) != first
    # Who believes the authority already believes the new one.
    assert read_roots(tmp_path / "tls" / "ca.pem") == ca


@pytest.mark.parametrize("damaged", ["stack.pem", "stack.key"])
def test_what_cannot_be_used_is_made_anew(damaged: str, tmp_path: Path) -> None:
    certificates.ensure(tmp_path, NOW)
    ca = read_roots(tmp_path / "tls" / "ca.pem")
    (tmp_path / "tls" / damaged).write_text("half")
    assert certificates.ensure(tmp_path, NOW)
    stack_pair(tmp_path)
    assert read_roots(tmp_path / "tls" / "ca.pem") == ca


def test_with_an_authority_of_another_key_all_is_made_anew(tmp_path: Path) -> None:
    certificates.ensure(tmp_path, NOW)
    first = read_roots(tmp_path / "tls" / "ca.pem")
    Authority.create("other", NOW).write(tmp_path / "tls" / "ca.pem", tmp_path / "tls" / "other.key")
    assert certificates.ensure(tmp_path, NOW)
    assert read_roots(tmp_path / "tls" / "ca.pem") != first
    assert not certificates.ensure(tmp_path, NOW)


def test_nothing_outlives_its_authority() -> None:
    authority = Authority.create("short", NOW)
    late = NOW + AUTHORITY_VALID - timedelta(days=1)
    pair = authority.issue("server", ["localhost"], late, timedelta(days=90))
    assert ends_at(pair) == authority.ends
    assert authority.signed(pair)
    assert not Authority.create("short", NOW).signed(pair)


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("127.0.0.1:7400", "127.0.0.1"),
        ("pool.example.com:7400", "pool.example.com"),
        ("[::1]:7400", "::1"),
        ("127.0.0.1:7400, 127.0.0.1:7404", "127.0.0.1"),
        ("dns:///pool:7400", "pool"),
        ("dns://10.0.0.1/pool:7400", "pool"),
        ("ipv4:10.0.0.1:7400,10.0.0.2:7400", ""),
    ],
)
def test_the_name_that_a_certificate_has_to_hold(address: str, name: str) -> None:
    assert certificate_name(address) == name


def test_the_record_of_a_stack_tells_how_to_call_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CA_FILE", "CERTIFICATE_FILE", "KEY_FILE", "SERVER_NAME"):
        monkeypatch.delenv(f"HEARTH_TLS_{name}", raising=False)
    assert reaching.tls(tmp_path) is None
    certificates.ensure(tmp_path, NOW)
    for ask_callers in (False, True):
        files = TlsFiles.below(tmp_path, ask_callers=ask_callers)
        record = StackRecord({"pool": ProcessRecord("pool", 1, 1.0, "127.0.0.1:1")}, tls=files)
        record.save(tmp_path / "stack.json")
        assert StackRecord.load(tmp_path / "stack.json") == record
        found = reaching.tls(tmp_path)
        assert found is not None
        assert (found.pair is not None) == ask_callers
        assert files.environment()["HEARTH_TLS_CLIENT_CA_FILE"] == (files.ca if ask_callers else "")
    # What the environment says counts before it.
    monkeypatch.setenv("HEARTH_TLS_CA_FILE", str(tmp_path / "tls" / "stack.pem"))
    told = reaching.tls(tmp_path)
    assert told is not None
    assert told.root_certificates == (tmp_path / "tls" / "stack.pem").read_bytes()
    monkeypatch.setenv("HEARTH_TLS_CA_FILE", str(tmp_path / "none"))
    with pytest.raises(typer.Exit) as ended:
        reaching.tls(tmp_path)
    assert ended.value.exit_code == 2


def test_a_record_of_a_stack_from_before_has_no_tls(tmp_path: Path) -> None:
    record = StackRecord(postgres_dsn=Secret("postgresql://x"))
    record.save(tmp_path / "stack.json")
    path = tmp_path / "stack.json"
    path.write_text(path.read_text().replace('"tls": null', '"later": null'))
    assert StackRecord.load(path) == record


def test_several_hosts_need_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    certificates.ensure(tmp_path, NOW)
    monkeypatch.setenv("HEARTH_TLS_CA_FILE", str(tmp_path / "tls" / "ca.pem"))
    monkeypatch.setenv("HEARTH_POOL_ADDRESS", "10.0.0.1:7400,10.0.0.2:7400")
    with pytest.raises(typer.Exit) as ended:
        reaching.connected(tmp_path)
    assert ended.value.exit_code == 2
    monkeypatch.setenv("HEARTH_TLS_SERVER_NAME", "pool")
    reaching.connected(tmp_path)


def test_files_of_the_user_for_a_stack(tmp_path: Path) -> None:
    assert TlsFiles.of_environment({"HEARTH_TLS_CA_FILE": "/ca.pem"}) is None
    given = {"HEARTH_TLS_CA_FILE": "/ca.pem", "HEARTH_TLS_CERTIFICATE_FILE": "/a.pem", "HEARTH_TLS_KEY_FILE": "/a.key"}
    found = TlsFiles.of_environment(given)
    assert found == TlsFiles("/ca.pem", "/a.pem", "/a.key")
    with pytest.raises(TlsError, match=r"ca\.pem cannot be read"):
        found.read()


@pytest.mark.parametrize(
    ("told", "what_to_do"),
    [
        ("Tls handshake failed: SSL_ERROR_SSL: WRONG_VERSION_NUMBER", "unset HEARTH_TLS_CA_FILE"),
        ("Custom verification check failed: Hostname Verification Check failed.", "HEARTH_TLS_SERVER_NAME"),
        ("CERTIFICATE_VERIFY_FAILED: certificate has expired", "has ended"),
        ("CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate", "not signed by the roots"),
        ("ipv4:127.0.0.1:1: Socket closed", "set HEARTH_TLS_CA_FILE"),
        ("ipv4:127.0.0.1:1: Connection refused", ""),
    ],
)
def test_what_grpc_says_of_tls_becomes_what_to_do(told: str, what_to_do: str) -> None:
    hint = tls_hint(f"failed to connect to all addresses; last error: UNKNOWN: {told}")
    assert what_to_do in hint
    assert bool(hint) == bool(what_to_do)
