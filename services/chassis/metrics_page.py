"""Where Prometheus reads the metrics of a process: `GET /metrics`, by HTTP, or by HTTPS where that is set.

It asks for no token. A scraper has no project, what it reads has no ids in it, and it must get an answer also while the
file of tokens is broken. So it is a port of its own, which belongs where only the monitoring reaches it: without
HEARTH_AUTH_FILE that is this machine, as for the service itself.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from prometheus_client.exposition import choose_encoder

from services.chassis.metrics import Readings, registry
from services.chassis.settings import EXIT_USAGE, Address, StartupError

if TYPE_CHECKING:
    from aiohttp import web

logger = logging.getLogger(__name__)

PATH = "/metrics"
# A scraper that goes away while the process ends is not waited for.
_CLOSE_SECONDS = 0.5


@asynccontextmanager
async def metrics_page(listen: str, readings: Readings, tls: ssl.SSLContext | None = None) -> AsyncIterator[str]:
    """Serve the page at `listen` while the block runs; host:port that is bound. Raises `StartupError`."""
    from aiohttp import web

    wanted = Address.parse(listen)

    async def answer(request: web.Request) -> web.Response:
        await readings.refresh()
        # Some milliseconds of work, which the calls of the process need not wait for.
        text, content_type = await asyncio.to_thread(_page, request.headers.get("Accept", ""))
        return web.Response(body=text, headers={"Content-Type": content_type})

    application = web.Application()
    application.router.add_get(PATH, answer)
    runner = web.AppRunner(application, access_log=None, handle_signals=False, shutdown_timeout=_CLOSE_SECONDS)
    await runner.setup()
    try:
        site = web.TCPSite(runner, wanted.host, wanted.port, reuse_port=False, ssl_context=tls)
        try:
            await site.start()
        except OSError as error:
            raise StartupError(
                f"cannot listen on {wanted}: {(error.strerror or str(error)).lower()}; set HEARTH_METRICS_LISTEN to"
                " another host:port",
                exit_code=EXIT_USAGE,
            ) from None
        address = str(Address(wanted.host, runner.addresses[0][1]))
        logger.info("metrics are served", extra={"address": address})
        yield address
    finally:
        await runner.cleanup()


def _page(accept: str) -> tuple[bytes, str]:
    """The page in the form that `accept` asks for, and the name of the form."""
    try:
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type
    except TypeError:
        # The library takes every version that is asked for to be made of numbers.
        encode, content_type = choose_encoder("")
        return encode(registry), content_type
