"""TLS as a caller of a deployment speaks it: which servers it believes, and what it shows them of itself.

```python
tls = Tls.of_files("ca.pem", certificate_file="backend.pem", key_file="backend.key")
async with Client(token="...", tls=tls) as hearth:
    ...
```
"""

from __future__ import annotations

import dataclasses
import os
import ssl
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Self

import grpc

CA_FILE = "HEARTH_TLS_CA_FILE"
CERTIFICATE_FILE = "HEARTH_TLS_CERTIFICATE_FILE"
KEY_FILE = "HEARTH_TLS_KEY_FILE"
SERVER_NAME = "HEARTH_TLS_SERVER_NAME"


class TlsError(ValueError):
    """Certificates or a key that cannot be used; the message names the `file` and says why."""

    def __init__(self, file: Path, why: str) -> None:
        super().__init__(f"{file} {why}")
        self.file = file


class Pair(NamedTuple):
    """A certificate, with those between it and its root, and the key that belongs to it; both PEM."""

    certificate_chain: bytes
    private_key: bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Tls:
    """How to connect with TLS. All in PEM.

    `root_certificates` are those that a server must be signed by. `pair` is shown to servers that ask who calls.
    `server_name` is the name that the certificates of the servers hold, where it is not the host of their address.
    """

    root_certificates: bytes
    pair: Pair | None = dataclasses.field(default=None, repr=False)
    server_name: str = ""

    @classmethod
    def of_files(
        cls,
        ca_file: str | Path,
        *,
        certificate_file: str | Path | None = None,
        key_file: str | Path | None = None,
        server_name: str = "",
    ) -> Self:
        """What the files hold now; a change of them is not seen. Raises `TlsError`."""
        pair = None
        if certificate_file is not None and key_file is not None:
            pair = read_pair(Path(certificate_file), Path(key_file))
        elif alone := certificate_file or key_file:
            raise TlsError(Path(alone), "is alone: a certificate and its key go together")
        return cls(read_roots(Path(ca_file)), pair, server_name)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Self | None:
        """What HEARTH_TLS_CA_FILE, HEARTH_TLS_CERTIFICATE_FILE, HEARTH_TLS_KEY_FILE and HEARTH_TLS_SERVER_NAME say.

        None, which is a connection without TLS, when the first one is not set. Raises `TlsError`.
        """
        given = os.environ if environment is None else environment
        if not given.get(CA_FILE):
            return None
        return cls.of_files(
            given[CA_FILE],
            certificate_file=given.get(CERTIFICATE_FILE) or None,
            key_file=given.get(KEY_FILE) or None,
            server_name=given.get(SERVER_NAME, ""),
        )

    def credentials(self) -> grpc.ChannelCredentials:
        """The same for gRPC."""
        chain, key = self.pair or (None, None)
        return grpc.ssl_channel_credentials(self.root_certificates, private_key=key, certificate_chain=chain)


def read_roots(path: Path) -> bytes:
    """The root certificates of a file; raises `TlsError` when there are none."""
    content = _read(path)
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=content.decode("ascii", "ignore"))
    except (ssl.SSLError, ValueError) as error:
        raise TlsError(path, "holds no certificates in PEM") from error
    return content


def read_pair(certificate_file: Path, key_file: Path) -> Pair:
    """A certificate and its key; raises `TlsError` when they cannot be read, or do not belong together."""
    # Takes longer to import than most commands take, and most callers show no certificate.
    from cryptography import x509
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    pair = Pair(_read(certificate_file), _read(key_file))
    try:
        certificate = x509.load_pem_x509_certificates(pair.certificate_chain)[0]
    except ValueError:
        raise TlsError(certificate_file, "holds no certificate in PEM") from None
    try:
        key = load_pem_private_key(pair.private_key, password=None)
    except TypeError:
        raise TlsError(key_file, "has a passphrase; the key must be without one") from None
    except (ValueError, UnsupportedAlgorithm):
        raise TlsError(key_file, "holds no key in PEM") from None
    if certificate.public_key() != key.public_key():
        raise TlsError(key_file, f"is not the key of the certificate in {certificate_file}")
    return pair


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise TlsError(path, f"cannot be read: {(error.strerror or str(error)).lower()}") from None
