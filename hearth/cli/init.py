"""`hearth init`: the secrets of a new deployment, made once, for `docker compose` or whatever starts the services."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from hearth.cli.output import Exit, fail, out, print_json
from hearth.cli.stack import Json

# Who needs more gets a token of their own: `hearth tokens add`.
SERVICES = {"name": "services", "project": "*", "scopes": ["internal", "read"]}
OPERATOR = {"name": "operator", "project": "*", "scopes": ["read", "run", "admin"]}

_TEMPLATE = """\
# Settings and secrets of this deployment. Keep it to yourself, and keep a copy: without HEARTH_SECRET_KEY
# nobody can read the credentials that are stored in the database.
# What can be set here: docker-compose.yml and docs/operating.md.

# Without `stores` Postgres and Valkey are yours, at the two addresses below. Without `observability` set
# OTEL_EXPORTER_OTLP_ENDPOINT to a collector of yours, or to nothing.
COMPOSE_PROFILES=stores,observability
HEARTH_POSTGRES_DSN=postgresql://hearth:{postgres}@postgres:5432/hearth
HEARTH_VALKEY_URL=redis://:{valkey}@valkey:6379/0
OTEL_EXPORTER_OTLP_ENDPOINT=http://otel-collector:4317
POSTGRES_PASSWORD={postgres}
VALKEY_PASSWORD={valkey}

# Seals the credentials of agents. To change it put a new one before it, separated by a comma.
HEARTH_SECRET_KEY={key}

# What the services show each other, and what you show them (`export HEARTH_TOKEN=...` for the hearth program).
# Their hashes are in deploy/tokens.json.
HEARTH_SERVICE_TOKEN={service}
HEARTH_OPERATOR_TOKEN={operator}
"""


def register(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command("init")(init)


def init(
    directory: Annotated[Path, typer.Argument(help="where docker-compose.yml is", file_okay=False)] = Path(),
    as_json: Json = False,
) -> None:
    """Make the secrets of a deployment: `.env` and `deploy/tokens.json`. Never replaces one that is there."""
    env, tokens = directory / ".env", directory / "deploy" / "tokens.json"
    for path in (env, tokens):
        if path.exists():
            fail(f"{path} is there already; remove it if this is to be a new deployment", Exit.USAGE)
    service, operator = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
    entries = {_hash(service): SERVICES, _hash(operator): OPERATOR}
    text = _TEMPLATE.format(
        postgres=secrets.token_urlsafe(24),
        valkey=secrets.token_urlsafe(24),
        key=base64.urlsafe_b64encode(os.urandom(32)).decode(),
        service=service,
        operator=operator,
    )
    tokens.parent.mkdir(parents=True, exist_ok=True)
    # The user of a container is another one than you, and must be able to read the hashes. They tell nobody the tokens.
    _write(tokens, json.dumps(entries, indent=2) + "\n", 0o644)
    _write(env, text, 0o600)
    if as_json:
        print_json({"env": str(env), "tokens": str(tokens)})
        return
    out.print(f"Secrets are in {env}, hashes of the tokens in {tokens}.", soft_wrap=True, markup=False)
    out.print("Next: docker compose up --build --wait")


def _hash(token: str) -> str:
    """As HEARTH_AUTH_FILE names a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def _write(path: Path, text: str, mode: int) -> None:
    """Whole and on disk, or not at all."""
    draft = path.with_name(f"{path.name}.new")
    draft.unlink(missing_ok=True)
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as file:
        os.fchmod(file.fileno(), mode)
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
