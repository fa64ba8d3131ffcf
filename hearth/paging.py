"""Lists that come in pages."""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol, TypeVar

from hearth.errors import answered

CALL_SECONDS = 30.0


class _Request(Protocol):
    page_token: str


class _Page(Protocol):
    @property
    def next_page_token(self) -> str: ...


_R = TypeVar("_R", bound=_Request)
_P = TypeVar("_P", bound=_Page)


async def pages(call: Callable[..., Awaitable[_P]], request: _R) -> AsyncIterator[_P]:
    """The responses of a list call, from the page that `request` asks for to the last one; the request stays as it is.

    Raises the `CallError` of the call.
    """
    wanted = copy.deepcopy(request)
    while True:
        page = await answered(call(wanted, timeout=CALL_SECONDS))
        yield page
        if not page.next_page_token:
            return
        wanted.page_token = page.next_page_token
