"""`hearth init` makes secrets once and for their owner only; `hearth health` tells a health check what it needs."""

from __future__ import annotations

import os
from pathlib import Path

from cryptography import x509
from dotenv import dotenv_values

from hearth.certificates import Authority
from hearth.secret import Secret
from hearth.tls import read_pair, read_roots
from services.chassis.auth import TokenFile
from services.pool.sealing import parse_keys
from tests.conftest import StartService
from tests.support.cli import Hearth


async def test_secrets_are_made_once_and_are_for_their_owner(tmp_path: Path) -> None:
    hearth = Hearth(tmp_path)
    made = (await hearth.run("init", str(tmp_path), "--json")).json()
    env, tokens = Path(made["env"]), Path(made["tokens"])
    assert env.stat().st_mode & 0o777 == 0o600
    values = dotenv_values(env)
    known = TokenFile(tokens)
    service = known.find(Secret(values["HEARTH_SERVICE_TOKEN"] or ""))
    operator = known.find(Secret(values["HEARTH_OPERATOR_TOKEN"] or ""))
    assert service is not None
    assert operator is not None
    assert sorted(service.scopes) == ["internal", "read"]
    assert sorted(operator.scopes) == ["admin", "read", "run"]
    assert len(parse_keys(values["HEARTH_SECRET_KEY"] or "")) == 1
    assert str(values["HEARTH_OPERATOR_TOKEN"]) not in tokens.read_text()

    before = env.read_text(), tokens.read_text()
    again = await hearth.run("init", str(tmp_path))
    assert again.code == 2
    assert "is there already" in again.stderr
    assert (env.read_text(), tokens.read_text()) == before


async def test_the_user_of_a_container_can_read_what_is_for_it_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        made = (await Hearth(tmp_path).run("init", str(tmp_path), "--tls", "--json")).json()
        tokens, certificates = Path(made["tokens"]), Path(made["tls"])
        adding = ("tokens", "add", "backend", "--file", str(tokens), "--project", "shop", "--scope", "read")
        assert (await Hearth(tmp_path).run(*adding)).code == 0
    finally:
        os.umask(before)
    for directory in (tokens.parent, certificates / "pool"):
        assert directory.stat().st_mode & 0o777 == 0o755
        for file in directory.glob("*.*"):
            assert file.name.startswith(".") or file.stat().st_mode & 0o777 == 0o644, file


async def test_two_deployments_share_nothing(tmp_path: Path) -> None:
    made = []
    for name in ("one", "two"):
        assert (await Hearth(tmp_path).run("init", str(tmp_path / name))).code == 0
        made.append(set(dotenv_values(tmp_path / name / ".env").items()))
    assert {name for name, _ in made[0] & made[1]} == {"COMPOSE_PROFILES", "OTEL_EXPORTER_OTLP_ENDPOINT"}


async def test_certificates_are_for_each_service_and_renewed_from_the_same_authority(tmp_path: Path) -> None:
    hearth = Hearth(tmp_path)
    made = (await hearth.run("init", str(tmp_path), "--tls", "--json")).json()
    directory = Path(made["tls"])
    values = dotenv_values(made["env"])
    assert (tmp_path / (values["HEARTH_TLS_DIRECTORY"] or "")).resolve() == directory
    assert not values["HEARTH_TLS_CLIENTS"]
    # Keys that another user reads in a container are behind a door that on this machine nobody else passes.
    assert directory.stat().st_mode & 0o777 == 0o700
    assert (directory / "ca.key").stat().st_mode & 0o777 == 0o600
    authority = Authority.read(directory / "ca.pem", directory / "ca.key")
    first = {}
    for name in ("pool", "history", "relay", "sandbox", "operator"):
        own = directory / name
        first[name] = read_pair(own / "certificate.pem", own / "key.pem")
        assert authority.signed(first[name])
        assert read_roots(own / "ca.pem") == authority.certificate
        certificate = x509.load_pem_x509_certificate(first[name].certificate_chain)
        if name != "operator":
            named = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            assert named.get_values_for_type(x509.DNSName) == [name, "localhost"]

    env = Path(made["env"]).read_text()
    assert (await hearth.run("init", str(tmp_path), "--renew-tls")).code == 0
    assert Path(made["env"]).read_text() == env
    assert read_roots(directory / "ca.pem") == authority.certificate
    for name, before in first.items():
        after = read_pair(directory / name / "certificate.pem", directory / name / "key.pem")
        assert authority.signed(after)
        assert after != before

    (directory / "ca.key").unlink()
    refused = await hearth.run("init", str(tmp_path), "--renew-tls")
    assert refused.code == 2
    assert "ca.key" in refused.stderr


async def test_health_by_exit_codes(tmp_path: Path, start_service: StartService, postgres_dsn: str) -> None:
    history = await start_service(
        "services.history", HEARTH_POSTGRES_DSN=postgres_dsn, HEARTH_VALKEY_URL="redis://127.0.0.1:9/0"
    )
    port = history.address.rpartition(":")[2]
    # As in a container, which knows where it listens and nothing else.
    hearth = Hearth(tmp_path, {"HEARTH_LISTEN": f"0.0.0.0:{port}"})
    told = (await hearth.run("health", "--json")).json()
    assert (told["address"], told["status"]) == (f"127.0.0.1:{port}", "SERVING")
    assert (await hearth.run("health", history.address, "--service", "postgres")).code == 0
    unknown = await hearth.run("health", history.address, "--service", "nonsense")
    assert unknown.code == 2, unknown.stderr
    await history.terminate()
    gone = await hearth.run("health", "--seconds", "1")
    assert gone.code == 3
    assert "does not answer" in gone.stderr


async def test_health_of_nothing_says_what_is_missing(tmp_path: Path) -> None:
    asked = await Hearth(tmp_path).run("health")
    assert asked.code == 2
    assert "HEARTH_LISTEN" in asked.stderr
