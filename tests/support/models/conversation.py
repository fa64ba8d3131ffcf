"""What a model is asked, whatever API it comes by: who said what, which tools there are, what the last answered."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

Json = dict[str, Any]


class Who(Enum):
    """Where an item of a conversation comes from."""

    USER = "user"
    MODEL = "model"
    TOOL = "tool"


@dataclass(frozen=True, slots=True)
class Item:
    """One text of a conversation: a message, or what a tool answered."""

    who: Who
    text: str


@dataclass(frozen=True, slots=True)
class Tool:
    """A tool that the model may call. `namespace` is set where the API groups tools."""

    name: str
    schema: Mapping[str, Any] = field(default_factory=dict)
    namespace: str = ""

    @property
    def full_name(self) -> str:
        """As the log names it."""
        return self.namespace + self.name


@dataclass(frozen=True, slots=True)
class Conversation:
    """A request to a model."""

    model: str
    stream: bool
    system: str
    users: tuple[str, ...]  # what people said, without what agents add in their name
    results: tuple[str, ...]  # what tools answered since the last of these
    tools: tuple[Tool, ...]
    images: int = 0


def conversation(
    *, model: object, stream: object, system: str, items: Iterable[Item], tools: Sequence[Tool], images: int
) -> Conversation:
    """The request of which these are the pieces, in the order in which they were said."""
    users: list[str] = []
    results: list[str] = []
    for item in items:
        if item.who is Who.TOOL:
            results.append(item.text)
        elif item.who is Who.USER and (text := said(item.text)):
            users.append(text)
            results.clear()
    return Conversation(str(model), stream is True, system, tuple(users), tuple(results), tuple(tools), images)


# Agents speak in the user's name: reminders, the environment, that a turn was cut. All of it in tags of theirs.
_TAGGED = re.compile(r"<([A-Za-z][\w.-]*)(?:\s[^<>]*)?>.*?</\1(?:\s[^<>]*)?>", re.DOTALL)
_REMARKS = re.compile(r"^(?:\[Request interrupted by user[^\]]*\]|# AGENTS\.md instructions.*)$", re.MULTILINE)


def said(text: str) -> str:
    """What a person said, of a text in the user's name; empty when it was the agent alone."""
    return _REMARKS.sub("", _TAGGED.sub("", text)).strip()


def text_of(content: object) -> str:
    """The text of a message in any of the three APIs: a string, or parts that have a `text`."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return ""
    return "\n".join(part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str))


def images_in(content: object) -> int:
    """How many parts of a message are images, in any of the three APIs."""
    if not isinstance(content, list):
        return 0
    return sum(isinstance(part, dict) and part.get("type") in ("image", "image_url", "input_image") for part in content)


def list_of(body: Mapping[str, Any], name: str) -> list[Json]:
    """The objects in a list of a request; none when there is no such list."""
    found = body.get(name)
    return [entry for entry in found if isinstance(entry, dict)] if isinstance(found, list) else []
