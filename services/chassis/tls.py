"""The certificates of a process: what it shows to its callers, and what it asks of them and of those it calls.

Files are read again when they have changed: a certificate that is renewed counts for every connection that is made from
then on, and those that are open go on. What cannot be used, as a half-written file or a key of another certificate,
changes nothing but the log.
"""

from __future__ import annotations

import logging
import ssl
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar, cast

import grpc

from hearth.tls import Tls, TlsError, read_pair, read_roots
from services.chassis.settings import EXIT_USAGE, PREFIX, ChassisSettings, StartupError

logger = logging.getLogger(__name__)

_T = TypeVar("_T")
_State = tuple[tuple[int, int, int] | None, ...]


class Watched(Generic[_T]):
    """What is made from files, made anew when one of them changed. Safe to use from several threads."""

    def __init__(self, files: Sequence[Path], make: Callable[[], _T]) -> None:
        """Makes it for the first time; raises what `make` raises. Later on a `TlsError` of `make` keeps the former."""
        self._files = tuple(files)
        self._make = make
        self._lock = threading.Lock()
        self._state = self._look()
        # What was told last of files that cannot be used, and in which state.
        self._told: tuple[_State, str] | None = None
        self._made = make()

    def current(self) -> _T:
        """As the files say now."""
        with self._lock:
            # Taken before the files are read: what changes meanwhile is seen the next time.
            state = self._look()
            if state != self._state:
                named = {"files": [str(file) for file in self._files]}
                try:
                    self._made = self._make()
                except TlsError as error:
                    # Tried each time until it works: what kept a file from being read, as its rights, may go without a
                    # trace in its state.
                    if self._told != (state, str(error)):
                        self._told = (state, str(error))
                        logger.error("certificates changed and cannot be used", extra={"cause": str(error), **named})
                else:
                    self._state, self._told = state, None
                    logger.info("certificates read again", extra=named)
            return self._made

    def _look(self) -> _State:
        return tuple(_state_of(file) for file in self._files)


def _state_of(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


class _Shown(NamedTuple):
    configuration: grpc.ServerCertificateConfiguration
    ends: float


class ServerTls(NamedTuple):
    """What the server is opened with, and when the certificate that it shows now ends: seconds since 1970."""

    credentials: grpc.ServerCredentials
    ends: Callable[[], float]


def server_tls(settings: ChassisSettings) -> ServerTls | None:
    """TLS of the server; None is without. Raises `StartupError`."""
    certificate, key, client_ca = settings.tls_certificate_file, settings.tls_key_file, settings.tls_client_ca_file
    if certificate is None or key is None:
        return None

    def read() -> _Shown:
        # Takes its time to import, and most services on one machine speak no TLS.
        from hearth.certificates import ends_at

        roots = read_roots(client_ca) if client_ca is not None else None
        pair = read_pair(certificate, key)
        made = grpc.ssl_server_certificate_configuration(
            [(pair.private_key, pair.certificate_chain)], root_certificates=roots
        )
        return _Shown(made, ends_at(pair).timestamp())

    watched = _watched(settings, ("tls_certificate_file", "tls_key_file", "tls_client_ca_file"), read)
    first = shown = watched.current()

    def changed() -> grpc.ServerCertificateConfiguration | None:
        # Asked in a thread of gRPC at each handshake. None is what it has already, which it need not take apart again.
        nonlocal shown
        before, shown = shown, watched.current()
        return shown.configuration if shown is not before else None

    # Its types do not know of None, its documentation does.
    fetch = cast("Callable[[], grpc.ServerCertificateConfiguration]", changed)
    credentials = grpc.dynamic_ssl_server_credentials(
        first.configuration, fetch, require_client_authentication=client_ca is not None
    )
    return ServerTls(credentials, lambda: watched.current().ends)


def client_tls(settings: ChassisSettings) -> Watched[Tls] | None:
    """How this process calls others, with its own certificate for those that ask for one; None is without TLS.

    Raises `StartupError`.
    """
    ca, certificate, key = settings.tls_ca_file, settings.tls_certificate_file, settings.tls_key_file
    if ca is None:
        return None
    name = settings.tls_server_name

    def read() -> Tls:
        return Tls.of_files(ca, certificate_file=certificate, key_file=key, server_name=name)

    return _watched(settings, ("tls_ca_file", "tls_certificate_file", "tls_key_file"), read)


def page_context(settings: ChassisSettings) -> ssl.SSLContext | None:
    """The same certificate for a page that is served by HTTPS; it asks its readers for none. None is without TLS.

    Raises `StartupError`.
    """
    certificate, key = settings.tls_certificate_file, settings.tls_key_file
    if certificate is None or key is None:
        return None

    def read() -> ssl.SSLContext:
        read_pair(certificate, key)
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(certificate, key)
        except (ssl.SSLError, OSError) as error:
            raise TlsError(certificate, f"and {key}: {error}") from error
        return context

    watched = _watched(settings, ("tls_certificate_file", "tls_key_file"), read)
    context = read()

    def choose(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        connection.context = watched.current()

    # Called in every handshake, also in one that names no server.
    context.sni_callback = choose
    return context


def _watched(settings: ChassisSettings, fields: Sequence[str], make: Callable[[], _T]) -> Watched[_T]:
    files: dict[str, Path] = {name: file for name in fields if (file := getattr(settings, name)) is not None}
    try:
        return Watched(list(files.values()), make)
    except TlsError as error:
        name = next((name for name, file in files.items() if file == error.file), fields[0])
        raise StartupError(f"{PREFIX}{name.upper()} is wrong: {error}", exit_code=EXIT_USAGE) from None
