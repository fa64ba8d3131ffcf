"""How a command reaches the services: their addresses, the token, and TLS, from the environment or the record of a
stack."""

from __future__ import annotations

import os
from pathlib import Path

from hearth.channel import certificate_name
from hearth.cli.output import Exit, fail
from hearth.client import Addresses, Client
from hearth.embedded.records import StackRecord
from hearth.tls import CA_FILE, Tls, TlsError


def addresses(root: Path) -> Addresses:
    """Where the services are: the environment, else the stack below `root`, else the standard ports."""
    record = _record(root)
    default = Addresses()

    def of(name: str) -> str:
        started = record.pool_address if name == "pool" else record.address(name)
        return os.environ.get(f"HEARTH_{name.upper()}_ADDRESS") or started or str(getattr(default, name))

    return Addresses(pool=of("pool"), history=of("history"), relay=of("relay"), sandbox=of("sandbox"))


def token() -> str:
    """Bearer token of the user, from HEARTH_TOKEN."""
    return os.environ.get("HEARTH_TOKEN", "")


def tls(root: Path) -> Tls | None:
    """How to connect: as the environment says where it names roots, else as the stack below `root` was started; None
    is without TLS. Ends the command where files cannot be used."""
    try:
        if os.environ.get(CA_FILE):
            return Tls.from_environment()
        files = _record(root).tls
        return files.read() if files is not None else None
    except TlsError as error:
        fail(f"TLS: {error}", Exit.USAGE)


def connected(root: Path) -> Client:
    """A client of the services; open it with `async with`."""
    where, how = addresses(root), tls(root)
    if how is not None and not how.server_name:
        try:
            for address in (where.pool, where.history, where.relay, where.sandbox):
                certificate_name(address)
        except ValueError as error:
            fail(str(error), Exit.USAGE)
    return Client(where, token=token(), tls=how)


def _record(root: Path) -> StackRecord:
    return StackRecord.load(root / "stack.json") or StackRecord()
