"""The certificates of a stack on this machine: an authority of its own, and one certificate for all of its services
and for who calls them from here."""

from __future__ import annotations

import contextlib
from datetime import UTC, datetime, timedelta
from pathlib import Path

from hearth.certificates import Authority, ends_at, write_pair
from hearth.embedded.records import TlsFiles
from hearth.tls import TlsError, read_pair

# All names by which this machine calls itself.
HOSTS = ("localhost", "127.0.0.1", "::1")
VALID = timedelta(days=90)
# With less than this left, the next start of the stack makes a new one.
RENEWED_BEFORE = timedelta(days=30)


def ensure(root: Path, now: datetime | None = None) -> bool:
    """Make what is missing, ends soon or cannot be used; the authority stays as long as it is good. Services that run
    read a new certificate by themselves. Returns whether there is a new one."""
    now = now or datetime.now(UTC)
    files = TlsFiles.below(root, ask_callers=False)
    ca, certificate, key = Path(files.ca), Path(files.certificate), Path(files.key)
    ca_key = ca.with_suffix(".key")
    ca.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        authority = Authority.read(ca, ca_key)
    except TlsError:
        authority = None
    if authority is None or authority.ends - now < VALID:
        authority = Authority.create("Hearth on this machine", now)
        authority.write(ca, ca_key)
    with contextlib.suppress(TlsError):
        pair = read_pair(certificate, key)
        if authority.signed(pair) and ends_at(pair) - now > RENEWED_BEFORE:
            return False
    write_pair(authority.issue("hearth stack", HOSTS, now, VALID), certificate, key)
    return True
