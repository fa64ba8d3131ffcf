"""`hearth init`: the secrets of a new deployment, made once, for `docker compose` or whatever starts the services; and
certificates for its services, made once and renewed."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated

import typer

from hearth.cli.output import Exit, fail, out, print_json
from hearth.cli.stack import Json
from hearth.files import write_whole
from hearth.tls import TlsError

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
# Their hashes are in deploy/auth/tokens.json.
HEARTH_SERVICE_TOKEN={service}
HEARTH_OPERATOR_TOKEN={operator}
"""

_TLS = """
# Where the certificates of the services are: without it they speak no TLS. With HEARTH_TLS_CLIENTS=required callers
# have to show one of the same authority. New ones: `hearth init --renew-tls`.
HEARTH_TLS_DIRECTORY=./deploy/tls
HEARTH_TLS_CLIENTS={clients}
"""
NAMES = ("pool", "history", "relay", "sandbox")
# By which a container and the machine that it runs on call it, beside its name.
_HOSTS = ("localhost", "127.0.0.1", "::1")
VALID = timedelta(days=365)


def register(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command("init")(init)


def init(
    directory: Annotated[Path, typer.Argument(help="where docker-compose.yml is", file_okay=False)] = Path(),
    tls: Annotated[
        bool, typer.Option("--tls", help="also an authority and certificates for the services, below deploy/tls")
    ] = False,
    mtls: Annotated[bool, typer.Option("--mtls", help="the same, and callers have to show a certificate too")] = False,
    renew_tls: Annotated[
        bool, typer.Option("--renew-tls", help="only new certificates, from the authority that is there")
    ] = False,
    as_json: Json = False,
) -> None:
    """Make the secrets of a deployment: `.env` and `deploy/auth/tokens.json`. Never replaces one that is there."""
    env, deploy = directory / ".env", directory / "deploy"
    # A directory of its own, which is mounted whole: a container sees no new version of a file that is mounted alone.
    tokens, certificates = deploy / "auth" / "tokens.json", deploy / "tls"
    if renew_tls:
        _certify(certificates)
        if as_json:
            print_json({"tls": str(certificates)})
        else:
            out.print(
                f"New certificates are in {certificates}, and running services read them.", soft_wrap=True, markup=False
            )
        return
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
    if tls or mtls:
        text += _TLS.format(clients="required" if mtls else "")
    if tls or mtls:
        _certify(certificates)
    # The user of a container is another one than you, and must be able to read the hashes. They tell nobody the tokens.
    _open_directory(tokens.parent)
    write_whole(tokens, (json.dumps(entries, indent=2) + "\n").encode(), 0o644)
    write_whole(env, text.encode(), 0o600)
    if as_json:
        print_json({"env": str(env), "tokens": str(tokens), **({"tls": str(certificates)} if tls or mtls else {})})
        return
    out.print(f"Secrets are in {env}, hashes of the tokens in {tokens}.", soft_wrap=True, markup=False)
    if tls or mtls:
        out.print(f"Certificates are in {certificates}. Who calls the services needs:", soft_wrap=True, markup=False)
        for name, file in (("CA", "ca"), *((("CERTIFICATE", "certificate"), ("KEY", "key")) if mtls else ())):
            out.print(
                f"  export HEARTH_TLS_{name}_FILE={certificates / 'operator' / file}.pem", soft_wrap=True, markup=False
            )
    out.print("Next: docker compose up --build --wait")


def _open_directory(path: Path) -> None:
    """One that the user of a container can enter, whatever the umask of whoever calls this."""
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(0o755)


def _hash(token: str) -> str:
    """As HEARTH_AUTH_FILE names a token."""
    return hashlib.sha256(token.encode()).hexdigest()


def _certify(directory: Path) -> None:
    """A certificate for each service and for the operator, from the authority that is there, or else from a new one."""
    # What it needs would slow down every other command.
    from hearth.certificates import Authority, write_pair

    now = datetime.now(UTC)
    # The keys of services are for everybody who gets here: the user of a container is another one than you. So nobody
    # else on this machine gets here.
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    ca, ca_key = directory / "ca.pem", directory / "ca.key"
    if ca.exists() or ca_key.exists():
        try:
            authority = Authority.read(ca, ca_key)
        except TlsError as error:
            fail(f"the authority cannot be used: {error}", Exit.USAGE)
    else:
        authority = Authority.create("Hearth", now)
        authority.write(ca, ca_key)
    for name in (*NAMES, "operator"):
        # One directory for each, so that a container sees no key but its own, and sees a new one when it is there.
        own = directory / name
        _open_directory(own)
        hosts = () if name == "operator" else (name, *_HOSTS)
        pair = authority.issue(f"hearth {name}", hosts, now, VALID)
        write_whole(own / "ca.pem", authority.certificate, 0o644)
        write_pair(pair, own / "certificate.pem", own / "key.pem", key_mode=0o600 if name == "operator" else 0o644)
