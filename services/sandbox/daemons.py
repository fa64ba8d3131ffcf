"""The agent daemon as this service sees it: is it there, and does it accept the token that only its holder knows?"""

from __future__ import annotations

import asyncio
import enum
import logging
import secrets
from collections.abc import Mapping

import aiohttp
from opentelemetry.instrumentation.utils import suppress_http_instrumentation

from hearth.secret import Secret
from services.chassis import http_client
from services.chassis.clock import Clock
from services.sandbox.providers.port import Address, DaemonFailed

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.05
_TOKEN_BYTES = 32
# Of an answer about its health.
_ANSWER_BYTES = 64 * 1024


class Pulse(enum.Enum):
    """What a probe found."""

    ALIVE = "alive"
    REFUSED = "refused"
    SILENT = "silent"


def new_token() -> Secret:
    """A token that nobody can guess."""
    return Secret(secrets.token_urlsafe(_TOKEN_BYTES))


class Daemons:
    """Probes daemons over connections that are kept open between probes."""

    def __init__(self, session: aiohttp.ClientSession, clock: Clock, *, timeout: float) -> None:
        """`timeout`: seconds until a daemon that does not answer counts as lost."""
        self._session = session
        self._clock = clock
        self._timeout = aiohttp.ClientTimeout(total=timeout)

    async def probe(self, url: str, token: Secret, headers: Mapping[str, str]) -> Pulse:
        """Ask for its health under the token. A daemon with another token refuses."""
        sent = {**headers, "Authorization": f"Bearer {token.reveal()}"}
        try:
            # Without a span of its own: the stage that it is part of has one.
            with suppress_http_instrumentation():
                # What answers there may be anything: nobody is asked whom it names.
                async with self._session.get(
                    f"{url}/v1/health", headers=sent, timeout=self._timeout, allow_redirects=False
                ) as response:
                    await http_client.read_body(response, _ANSWER_BYTES)
                    if response.status == 200:
                        return Pulse.ALIVE
                    return Pulse.REFUSED if response.status in (401, 403) else Pulse.SILENT
        except (aiohttp.ClientError, TimeoutError, asyncio.IncompleteReadError):
            return Pulse.SILENT

    async def until_alive(self, address: Address, token: Secret, seconds: float) -> None:
        """Return when the daemon answers. Raises `DaemonFailed` after `seconds`."""
        until = self._clock.monotonic() + seconds
        while True:
            pulse = await self.probe(address.url, token, address.headers)
            if pulse is Pulse.ALIVE:
                return
            if self._clock.monotonic() > until:
                raise DaemonFailed(f"the daemon does not answer after {seconds:g} s ({pulse.value})")
            await self._clock.sleep(_POLL_SECONDS)
