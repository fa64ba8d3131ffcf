"""Settings: a wrong variable is named by the name in the environment and ends the process with 2."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import Field

from hearth.secret import Secret
from services.chassis.settings import Address, ChassisSettings, PostgresSettings, ValkeySettings, load


class Both(PostgresSettings, ValkeySettings):
    listen: str = "127.0.0.1:7401"
    lease: float = Field(default=90, gt=0)
    program: list[str] = Field(default=["run"])


GOOD = {"HEARTH_POSTGRES_DSN": "postgresql://u:geheim@h/d", "HEARTH_VALKEY_URL": "redis://h:1/0"}


def loaded(monkeypatch: pytest.MonkeyPatch, **env: str) -> Both:
    for name, value in {**GOOD, **env}.items():
        monkeypatch.setenv(name, value)
    return load(Both)


def refusal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], **env: str) -> str:
    with pytest.raises(SystemExit) as caught:
        loaded(monkeypatch, **env)
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_a_service_reads_its_own_and_the_shared_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = loaded(monkeypatch, HEARTH_LEASE="5", HEARTH_LOG_LEVEL="debug", HEARTH_TOKEN="")
    assert (settings.lease, settings.log_level, settings.listen) == (5, "DEBUG", "127.0.0.1:7401")
    assert settings.postgres_dsn.reveal() == GOOD["HEARTH_POSTGRES_DSN"]


def test_a_missing_one_is_named_and_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        load(Both)
    said = capsys.readouterr().err
    assert "HEARTH_POSTGRES_DSN is not set: postgresql://user:password@host:port/database" in said
    assert "HEARTH_VALKEY_URL is not set" in said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HEARTH_LISTEN", "7401"),
        ("HEARTH_LISTEN", "127.0.0.1:99999"),
        ("HEARTH_LISTEN", "::1:7401"),
        ("HEARTH_LISTEN", "127.0.0.1:٣"),
        ("HEARTH_LEASE", "-1"),
        ("HEARTH_LEASE", "soon"),
        ("HEARTH_LOG_LEVEL", "LOUD"),
        ("HEARTH_AUTH_FILE", "/no/such/file"),
        ("HEARTH_HISTORY_ADDRESS", "history"),
        ("HEARTH_HISTORY_ADDRESS", "dns:///history"),
        ("HEARTH_HISTORY_ADDRESS", "history:1,history:2"),
        ("HEARTH_VALKEY_URL", "http://x"),
    ],
)
def test_each_wrong_one_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    assert f"{name} is wrong:" in refusal(monkeypatch, capsys, **{name: value})


def test_a_list_that_is_no_json_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(monkeypatch, capsys, HEARTH_PROGRAM="run it") == "HEARTH_PROGRAM is wrong: it is not JSON\n"


def test_secrets_are_not_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(monkeypatch, capsys, HEARTH_POSTGRES_DSN="mysql://u:geheim@h/d")
    assert "HEARTH_POSTGRES_DSN" in said
    assert "geheim" not in said
    settings = loaded(monkeypatch, HEARTH_POSTGRES_DSN=GOOD["HEARTH_POSTGRES_DSN"], HEARTH_TOKEN="geheim-too")
    for text in (repr(settings), str(settings), str(settings.model_dump()), settings.model_dump_json()):
        assert "geheim" not in text


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HEARTH_POSTGRES_DSN", "postgresql://u:geheim/x@h/d"),
        ("HEARTH_POSTGRES_DSN", "postgresql://u:geheim#x@h/d"),
        ("HEARTH_POSTGRES_DSN", "postgresql://u:[geheim@h/d"),
        ("HEARTH_POSTGRES_DSN", "postgresql://u:geheim@h:99999/d"),
        ("HEARTH_VALKEY_URL", "redis://u:geheim?x@h/0"),
        ("HEARTH_VALKEY_URL", "redis://u:geheim@h:port/0"),
    ],
)
def test_a_password_that_is_taken_for_a_port_is_not_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, value: str
) -> None:
    said = refusal(monkeypatch, capsys, **{name: value})
    assert f"{name} is wrong: has a host or port that cannot be read" in said
    assert "geheim" not in said


@pytest.mark.parametrize(
    "dsn", ["postgresql://u:p@ss@h/d", "postgresql://[::1]:5432/d", "postgresql://a:1,b:2/d", "postgresql:///d"]
)
def test_hosts_that_can_be_read(monkeypatch: pytest.MonkeyPatch, dsn: str) -> None:
    assert loaded(monkeypatch, HEARTH_POSTGRES_DSN=dsn).postgres_dsn == Secret(dsn)


@pytest.mark.parametrize("listen", ["0.0.0.0:7400", "[::]:7400", "10.0.0.1:7400", "example.org:7400"])
def test_without_auth_only_this_machine(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], listen: str
) -> None:
    said = refusal(monkeypatch, capsys, HEARTH_LISTEN=listen)
    assert "HEARTH_LISTEN" in said
    assert "HEARTH_AUTH_FILE" in said
    said = refusal(monkeypatch, capsys, HEARTH_LISTEN="127.0.0.1:0", HEARTH_METRICS_LISTEN=listen)
    assert "HEARTH_METRICS_LISTEN" in said
    assert "HEARTH_AUTH_FILE" in said


def test_with_auth_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    file.write_text("{}")
    assert loaded(monkeypatch, HEARTH_LISTEN="0.0.0.0:7400", HEARTH_AUTH_FILE=str(file)).auth_file == file
    metrics = loaded(monkeypatch, HEARTH_METRICS_LISTEN="0.0.0.0:9464", HEARTH_AUTH_FILE=str(file)).metrics_listen
    assert metrics == "0.0.0.0:9464"


def test_half_a_certificate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    key = tmp_path / "key.pem"
    key.write_text("k")
    assert "HEARTH_TLS_CERTIFICATE_FILE" in refusal(monkeypatch, capsys, HEARTH_TLS_KEY_FILE=str(key))


def test_standard_name_of_the_collector(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:4317")
    assert ChassisSettings().otlp_endpoint == "http://127.0.0.1:4317"


@pytest.mark.parametrize(
    "address", ["history:7401", "[::1]:7401", "10.0.0.1:1,10.0.0.2:1", "dns:///history:7401", "unix:/run/history"]
)
def test_replicas_are_one_address(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    assert loaded(monkeypatch, HEARTH_HISTORY_ADDRESS=address).history_address == address


@pytest.mark.parametrize("text", ["127.0.0.1:0", "[::1]:7400", "localhost:7400"])
def test_addresses_of_this_machine(text: str) -> None:
    assert Address.parse(text).loopback
    assert str(Address.parse(text)) == text
