"""A stack with an auth file that a test changes while it runs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from hearth.channel import open_channel
from hearth.client import Addresses
from services.chassis.auth import ANY_PROJECT, hash_token
from services.chassis.scopes import SCOPE_NAMES
from tests.support.cli import SERVICES, Hearth, running

OPERATOR = "token-of-the-operator"


def entry(name: str, project: str, scopes: Sequence[str] = SCOPE_NAMES) -> dict[str, Any]:
    """An entry of the auth file."""
    return {"name": name, "project": project, "scopes": list(scopes)}


@dataclasses.dataclass(slots=True)
class Guarded:
    """The stack: `grant` says which tokens count from now on, beside the operator's."""

    hearth: Hearth
    file: Path
    channels: list[grpc.aio.Channel] = dataclasses.field(default_factory=list)

    def grant(self, tokens: Mapping[str, Mapping[str, Any]]) -> None:
        """`tokens`: token → entry."""
        write(self.file, tokens)

    def addresses(self) -> Addresses:
        """Of the services, for a client."""
        found = self.hearth.addresses()
        return Addresses(**{name: found[name] for name in SERVICES})

    def channel(self, process: str, token: str) -> grpc.aio.Channel:
        """To a service, with a token; closed at the end."""
        channel = open_channel(self.hearth.addresses()[process], token=token)
        self.channels.append(channel)
        return channel


def write(file: Path, tokens: Mapping[str, Mapping[str, Any]]) -> None:
    """Replace the auth file, whole."""
    every = {OPERATOR: entry("operator", ANY_PROJECT), **tokens}
    draft = file.with_suffix(".new")
    draft.write_text(json.dumps({hash_token(token): said for token, said in every.items()}))
    draft.replace(file)


@asynccontextmanager
async def guarded(directory: Path, environment: Mapping[str, str] | None = None) -> AsyncIterator[Guarded]:
    """A stack of its own below `directory`."""
    file = directory / "tokens.json"
    write(file, {})
    given = {"HEARTH_AUTH_FILE": str(file), "HEARTH_TOKEN": OPERATOR, **(environment or {})}
    async with running(directory / ".hearth", given) as hearth:
        found = Guarded(hearth, file)
        try:
            yield found
        finally:
            for channel in found.channels:
                await channel.close()
