"""`hearth health`: does the service at an address serve? For health checks of containers, and for people."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import grpc
import grpc.aio
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from hearth.channel import open_channel
from hearth.cli.output import Exit, fail, out, print_json
from hearth.cli.stack import Json
from hearth.cli.words import tls_hint
from hearth.tls import CA_FILE, CERTIFICATE_FILE, KEY_FILE, SERVER_NAME, Tls
from hearth.version import VERSION_KEY

_LISTEN = "HEARTH_LISTEN"
# An address that stands for all of a machine is no address to call.
_EVERYWHERE = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - what a setting is compared with


def register(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command()(health)


def health(
    address: Annotated[str, typer.Argument(help=f"host:port; none: of this machine, the port of {_LISTEN}")] = "",
    service: Annotated[
        str, typer.Option(help="a gRPC service, or what the process depends on, as `postgres`; none: the whole of it")
    ] = "",
    tls_ca: Annotated[
        Path | None, typer.Option(envvar=CA_FILE, exists=True, dir_okay=False, help="roots for TLS, PEM")
    ] = None,
    tls_certificate: Annotated[
        Path | None,
        typer.Option(envvar=CERTIFICATE_FILE, exists=True, dir_okay=False, help="shown to who asks for one, PEM"),
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(envvar=KEY_FILE, exists=True, dir_okay=False, help="its key")] = None,
    server_name: Annotated[
        str, typer.Option(envvar=SERVER_NAME, help="name in the certificate, where it is not the host")
    ] = "",
    seconds: Annotated[float, typer.Option(min=0.1, help="how long to wait for the answer")] = 3.0,
    json: Json = False,
) -> None:
    """Ask a service whether it serves. Exit code 0: it does; 1: it answers, and does not; 3: no answer."""
    where = address or _own_address()
    try:
        tls = None
        if tls_ca is not None:
            tls = Tls.of_files(tls_ca, certificate_file=tls_certificate, key_file=tls_key, server_name=server_name)
        status, version = asyncio.run(_asked(where, service, tls, seconds))
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.NOT_FOUND:
            fail(f"{where} knows no {service!r}", Exit.USAGE)
        hint = tls_hint(error.details() or "")
        told = f"{where} does not answer: {error.code().name} {error.details()}"
        fail(f"{told}\n  {hint}" if hint else told, Exit.UNREACHABLE)
    except ValueError as error:
        fail(str(error), Exit.USAGE)
    if json:
        print_json({"address": where, "service": service, "status": status, "version": version})
    else:
        out.print(f"{where} {status.lower().replace('_', ' ')}{f', version {version}' if version else ''}")
    if status != "SERVING":
        raise typer.Exit(Exit.FAILED)


def _own_address() -> str:
    listen = os.environ.get(_LISTEN, "")
    host, _, port = listen.rpartition(":")
    if not host:
        fail(f"give an address, or set {_LISTEN}", Exit.USAGE)
    return f"{_EVERYWHERE.get(host, host)}:{port}"


async def _asked(address: str, service: str, tls: Tls | None, seconds: float) -> tuple[str, str]:
    """Status and version. Raises AioRpcError, and ValueError for what is no address."""
    async with open_channel(address, tls=tls) as channel:
        call = health_pb2_grpc.HealthStub(channel).Check(
            health_pb2.HealthCheckRequest(service=service), timeout=seconds
        )
        answer = await call
        trailing = dict(await call.trailing_metadata() or ())
    version = trailing.get(VERSION_KEY, "")
    return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status), str(version)
