"""docker-compose.yml: it follows the schema of Compose, and each service does its work with the very command and
environment that the file gives it."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from ruamel.yaml import YAML

from services.chassis.settings import ChassisSettings
from services.history.settings import HistorySettings
from services.pool.settings import PoolSettings
from services.relay.settings import RelaySettings
from services.sandbox.settings import SandboxSettings
from tests.deployment import compose
from tests.deployment.compose import ROOT, SERVICES
from tests.deployment.conftest import Deployed, operator
from tests.support.cli import PROGRAM

SETTINGS: dict[str, type[ChassisSettings]] = {
    "history": HistorySettings,
    "relay": RelaySettings,
    "sandbox": SandboxSettings,
    "pool": PoolSettings,
}


def test_it_follows_the_schema_of_compose() -> None:
    checker = PROGRAM.with_name("check-jsonschema")
    done = subprocess.run(
        [checker, "--builtin-schema", "vendor.compose-spec", compose.FILE], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_images_of_others_are_of_one_version() -> None:
    for name, service in compose.raw()["services"].items():
        assert re.search(r":v?\d+\.\d+|\$\{HEARTH_IMAGE", service["image"]), f"{name}: {service['image']}"


def test_without_secrets_it_says_what_to_do(tmp_path: Path) -> None:
    empty = tmp_path / ".env"
    empty.touch()
    with pytest.raises(Exception, match="hearth init"):
        compose.read(empty)


def test_every_file_that_it_mounts_is_there(deployment: Path) -> None:
    for service in compose.read(deployment / ".env").values():
        for inside, outside in service.files.items():
            if outside.startswith("./"):
                assert (ROOT / outside).exists() or (deployment / outside).exists(), f"{service.name}: {inside}"


def test_files_that_are_read_again_lie_in_directories_that_are_mounted(deployment: Path) -> None:
    """A new version is another file of the same name: where the first was mounted alone, a container sees no other."""
    for name in SERVICES:
        service = compose.read(deployment / ".env", {"HEARTH_TLS_DIRECTORY": "./deploy/tls"})[name]
        found = [Path(value) for key, value in service.environment.items() if key.endswith("_FILE") and value]
        assert len(found) == 4
        for file in found:
            assert str(file.parent) in service.files, f"{name}: {file}"


@pytest.mark.parametrize("name", SERVICES)
def test_every_variable_is_a_setting(name: str, deployment: Path) -> None:
    known = {"OTEL_EXPORTER_OTLP_ENDPOINT", *(f"HEARTH_{field.upper()}" for field in SETTINGS[name].model_fields)}
    given = compose.read(deployment / ".env")[name].environment
    assert set(given) <= known


def test_whoever_is_waited_for_has_a_health_check(deployment: Path) -> None:
    services = compose.read(deployment / ".env")
    for service in services.values():
        depends = service.raw.get("depends_on", {})
        for other, how in depends.items() if isinstance(depends, dict) else ():
            assert how["condition"] == "service_healthy"
            # The services of the image have that of the image.
            assert other in SERVICES or services[other].raw["healthcheck"], other


def test_settings_of_the_collector_and_of_prometheus_fit_the_file(deployment: Path) -> None:
    """Pipelines use what is defined and send to what is there; the port of metrics is that of the services."""
    services = compose.read(deployment / ".env")
    collector = YAML(typ="safe").load((ROOT / "deploy" / "otel-collector.yaml").read_text())
    for pipeline in collector["service"]["pipelines"].values():
        for kind in ("receivers", "processors", "exporters"):
            assert set(pipeline[kind]) <= set(collector[kind])
    assert collector["exporters"]["otlp"]["endpoint"].partition(":")[0] in services
    endpoint = services["pool"].environment["OTEL_EXPORTER_OTLP_ENDPOINT"]
    assert endpoint.startswith("http://otel-collector:")
    assert (
        endpoint.rpartition(":")[2]
        == collector["receivers"]["otlp"]["protocols"]["grpc"]["endpoint"].rpartition(":")[2]
    )
    prometheus = YAML(typ="safe").load((ROOT / "deploy" / "prometheus" / "prometheus.yml").read_text())
    for rules in prometheus["rule_files"]:
        assert (ROOT / "deploy" / "prometheus" / rules).is_file()
    (found,) = prometheus["scrape_configs"][0]["dns_sd_configs"]
    assert set(found["names"]) == set(SERVICES)
    assert {services[name].environment["HEARTH_METRICS_LISTEN"].rpartition(":")[2] for name in SERVICES} == {
        str(found["port"])
    }


@pytest.mark.timeout(180)
async def test_commands_and_environments_of_the_file_hold_a_conversation(deployed: Deployed) -> None:
    async with deployed() as placed:
        for name in SERVICES:
            await placed.start(name)
        mine = operator(placed)
        first = await mine.run("send", "first", "remember my name is Ada", "--wait", "--json", seconds=180)
        assert first.code == 0, first.stderr
        second = await mine.run("send", "first", "what is my name?", "--wait", seconds=180)
        assert "Ada" in second.stdout, second.stdout + second.stderr
        doctor = await mine.run("doctor")
        # What it finds is that the agents are processes of the container of their service.
        assert doctor.code == 1, doctor.stdout + doctor.stderr
        (found,) = (line for line in (doctor.stdout + doctor.stderr).splitlines() if line.split()[0] == "settings")
        assert "local, which isolates nothing" in found
        mine.environment["HEARTH_TOKEN"] = ""
        refused = await mine.run("send", "first", "who am I?")
        assert refused.code == 4, refused.stderr
        assert "UNAUTHENTICATED" in refused.stderr


async def test_what_is_given_to_the_services_is_not_in_their_logs(deployed: Deployed) -> None:
    async with deployed() as placed:
        (history,) = await placed.start("history")
    log = history.log.read_text()
    assert "serving" in log
    for secret in ("HEARTH_TOKEN", "HEARTH_POSTGRES_DSN", "HEARTH_VALKEY_URL"):
        assert history.environment[secret] not in log


@pytest.mark.timeout(240)
@pytest.mark.parametrize("deployment", [("--mtls",)], indirect=True)
async def test_with_certificates_everything_speaks_tls_and_asks_who_calls(deployed: Deployed, deployment: Path) -> None:
    """The services among themselves, the health check of the image, and who comes from outside."""
    async with deployed(HEARTH_POOL_REPLICAS="2") as placed:
        for name in SERVICES:
            await placed.start(name)
        mine = operator(placed)
        first = await mine.run("send", "first", "remember my name is Ada", "--wait", "--json", seconds=180)
        assert first.code == 0, first.stderr
        second = await mine.run("send", "first", "what is my name?", "--wait", seconds=180)
        assert "Ada" in second.stdout, second.stdout + second.stderr
        entries = await mine.run("pool", "entries")
        assert entries.code == 0, entries.stderr
        for left_out in (["CERTIFICATE_FILE", "KEY_FILE"], ["CERTIFICATE_FILE", "KEY_FILE", "CA_FILE"]):
            stranger = operator(placed)
            for name in left_out:
                stranger.environment.pop(f"HEARTH_TLS_{name}")
            refused = await stranger.run("sessions")
            assert refused.code == 3, refused.stderr
            assert "HEARTH_TLS_CA_FILE" in refused.stderr

        renewed = await mine.run("init", str(deployment), "--renew-tls")
        assert renewed.code == 0, renewed.stderr
        (relay,) = placed.of("relay")
        await placed.healthy(relay)
        again = await operator(placed).run("send", "first", "what is my name?", "--wait", seconds=180)
        assert "Ada" in again.stdout, again.stdout + again.stderr
        assert "certificates read again" in relay.log.read_text()
