"""docker-compose.yml as it would be run: read, its variables filled in from an environment file."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import expandvars
from dotenv import dotenv_values
from ruamel.yaml import YAML

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docker-compose.yml"
SERVICES = ("history", "sandbox", "relay", "pool")


@dataclass(frozen=True, slots=True)
class Service:
    """One of the file. `files` are paths in the container: its volumes, each with where it comes from."""

    name: str
    image: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    files: Mapping[str, str]
    replicas: int
    needs: frozenset[str]
    raw: Mapping[str, Any]

    @property
    def port(self) -> int:
        """That others find it at."""
        return int(self.environment["HEARTH_LISTEN"].rpartition(":")[2])


def read(environment_file: Path, changes: Mapping[str, str] | None = None) -> dict[str, Service]:
    """The services of the profiles that are switched on, by name. `changes` win over the environment file."""
    values = {name: value or "" for name, value in dotenv_values(environment_file).items()} | dict(changes or {})
    whole = expanded(YAML(typ="safe").load(FILE.read_text()), values)
    profiles = set(values.get("COMPOSE_PROFILES", "").split(","))
    return {
        name: _service(name, raw)
        for name, raw in whole["services"].items()
        if not raw.get("profiles") or profiles & set(raw["profiles"])
    }


def raw() -> Any:
    """The file as it is."""
    return YAML(typ="safe").load(FILE.read_text())


def dumped(whole: Any) -> str:
    """As YAML."""
    text = StringIO()
    YAML(typ="safe").dump(whole, text)
    return text.getvalue()


def expanded(part: Any, values: Mapping[str, str]) -> Any:
    """With `${NAME}`, `${NAME:-default}` and `${NAME:?message}` filled in, wherever they are."""
    if isinstance(part, dict):
        return {name: expanded(value, values) for name, value in part.items()}
    if isinstance(part, list):
        return [expanded(value, values) for value in part]
    return expandvars.expand(part, environ=values) if isinstance(part, str) else part


def _service(name: str, raw: Mapping[str, Any]) -> Service:
    files = {}
    for volume in raw.get("volumes", []):
        source, target, *_ = volume.split(":")
        files[target] = source
    return Service(
        name=name,
        image=raw["image"],
        command=tuple(raw.get("command", ())),
        environment={key: str(value) for key, value in raw.get("environment", {}).items()},
        files=files,
        replicas=int(raw.get("deploy", {}).get("replicas", 1)),
        needs=frozenset(raw.get("depends_on", {})),
        raw=raw,
    )
