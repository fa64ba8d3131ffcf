"""Hearth for Python: a client of a deployment, and what its calls give and raise.

    import hearth

    async with hearth.Client(token="...") as client:
        key = hearth.session_key("acme", "chat-1")
        sent = await client.send(key, "hello")
        async for transcript in client.follow(key, until_ended=sent.started.execution.execution_id):
            ...

Names are loaded when they are first used, so that programs which need only the messages below `hearth.*.v1` do not pay
for the rest.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hearth.client import Addresses as Addresses
    from hearth.client import Client as Client
    from hearth.client import decided as decided
    from hearth.client import session_key as session_key
    from hearth.client import text_content as text_content
    from hearth.client import told as told
    from hearth.errors import CallError as CallError
    from hearth.reducer import Entry as Entry
    from hearth.reducer import Transcript as Transcript
    from hearth.reducer import is_ending as is_ending
    from hearth.reducer import text_of as text_of
    from hearth.tls import Tls as Tls
    from hearth.watch import Watch as Watch

_HOMES = {
    **dict.fromkeys(("Addresses", "Client", "decided", "session_key", "text_content", "told"), "hearth.client"),
    "CallError": "hearth.errors",
    **dict.fromkeys(("Entry", "Transcript", "is_ending", "text_of"), "hearth.reducer"),
    "Tls": "hearth.tls",
    "Watch": "hearth.watch",
}

__all__ = [
    "Addresses",
    "CallError",
    "Client",
    "Entry",
    "Tls",
    "Transcript",
    "Watch",
    "decided",
    "is_ending",
    "session_key",
    "text_content",
    "text_of",
    "told",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'hearth' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
