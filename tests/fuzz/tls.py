"""How a stack that is fuzzed speaks TLS, and how its callers do."""

from __future__ import annotations

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import grpc

from hearth.tls import Tls as Callers

# Of `hearth up`; the seed of a run chooses one.
MODES: tuple[tuple[str, ...], ...] = ((), ("--tls",), ("--mtls",))


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files of a stack; callers show the certificate of the stack."""

    ca: str
    certificate: str
    key: str

    @classmethod
    def of_record(cls, record: Mapping[str, str] | None) -> Tls | None:
        """What `stack.json` says; None for a stack without TLS."""
        return cls(record["ca"], record["certificate"], record["key"]) if record else None

    def credentials(self) -> grpc.ChannelCredentials:
        """For gRPC."""
        return Callers.of_files(
            Path(self.ca), certificate_file=Path(self.certificate), key_file=Path(self.key)
        ).credentials()

    def context(self) -> ssl.SSLContext:
        """For a bare connection."""
        made = ssl.create_default_context(cafile=self.ca)
        made.load_cert_chain(self.certificate, self.key)
        made.set_alpn_protocols(["h2"])
        return made
