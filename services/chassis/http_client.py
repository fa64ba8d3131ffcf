"""HTTP calls to what may be in anybody's hands, as a port of a sandbox is: an answer can be endless, swell when it is
unpacked, or try to be remembered."""

from __future__ import annotations

from typing import Any

import aiohttp


class BodyTooLarge(aiohttp.ClientError):
    """An answer is larger than any of its kind; the connection ends with it."""


def new_session(**options: Any) -> aiohttp.ClientSession:
    """Connections where nothing is unpacked and no cookie kept; close it when done. `options` are those of aiohttp."""
    return aiohttp.ClientSession(
        headers={"Accept-Encoding": "identity"},
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
        **options,
    )


async def read_body(response: aiohttp.ClientResponse, limit: int) -> bytes:
    """All of an answer. Raises `BodyTooLarge` as soon as it has more than `limit` bytes."""
    body = bytearray()
    async for chunk in response.content.iter_any():
        body += chunk
        if len(body) > limit:
            raise BodyTooLarge(f"the answer has more than {limit} bytes")
    return bytes(body)
