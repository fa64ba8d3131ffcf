"""What the model answers. Pure.

The last paragraph of the user's last message is a script when its lines begin with one of these words:

    say: TEXT                     says it
    think: TEXT                   the same as a thought
    stream: COUNT [MILLISECONDS]  says COUNT numbered words, with that pause before each
    stall: SECONDS                says nothing for that long
    recall:                       says all that the user ever said
    run: COMMAND                  calls the agent's tool for shell commands
    write: PATH TEXT              calls its tool for writing files
    call: NAME JSON               calls the tool whose name ends with (or else has in it) NAME
    fail: STATUS [TIMES]          the HTTP request fails with that status; only TIMES times
    cut:                          the connection breaks here

An answer goes up to the next call. When the agent comes back with its result the script goes on behind the call, and
behind the last line the model says what the last tool answered. Any other message is repeated. A request that offers no
tools at all is something the agent wants to know for itself, as a title, and gets two words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.support.models.conversation import Conversation, Tool

RESULT_CHARACTERS = 300
TITLE = "Small talk"

_LINE = re.compile(r"^(say|think|stream|stall|recall|run|write|call|fail|cut):\s*(.*)$")
_SHELLS = ("exec_command", "shell_command", "shell", "bash", "local_shell", "run_shell_command")
_WRITERS = ("write", "write_file", "create_file")


@dataclass(frozen=True, slots=True)
class Say:
    """A piece of text, after a pause in seconds."""

    text: str
    after: float = 0.0
    thought: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    """A tool call; it ends an answer."""

    tool: Tool
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Cut:
    """The connection breaks."""


@dataclass(frozen=True, slots=True)
class Fail:
    """The request fails with this status, unless it failed as often as `times` says."""

    status: int
    times: int | None


Piece = Say | Call | Cut
Line = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """What to do with a request: fail, else say and call these. `about` names the message, for counting failures."""

    fail: Fail | None
    pieces: Sequence[Piece]
    about: str


def answer(asked: Conversation) -> Answer:
    """The answer to a request. Raises ValueError when a line of the script cannot be read."""
    if not asked.tools:
        return Answer(None, [Say(TITLE)], "")
    lines = script_of(asked.users[-1]) if asked.users else []
    due = _due(lines, len(asked.results))
    fail = next((_fail(text) for word, text in due if word == "fail"), None)
    pieces = [piece for line in due for piece in _pieces(line, asked)]
    if not pieces:
        pieces = [*_words(_closing(asked))]
    return Answer(fail, pieces, f"{len(asked.users)}/{len(asked.results)}")


def script_of(text: str) -> list[Line]:
    """The script in a message: its last paragraph, when each of its lines is one."""
    paragraph = re.split(r"\n\s*\n", text.strip())[-1]
    found = [_LINE.match(line.strip()) for line in paragraph.splitlines()]
    return [(match[1], match[2].strip()) for match in found if match] if all(found) else []


def _due(lines: Sequence[Line], results: int) -> list[Line]:
    """The lines up to the next call, behind as many calls as there are results."""
    calls = [place for place, (word, _) in enumerate(lines) if word in ("run", "write", "call")]
    begin = 0 if not results else calls[results - 1] + 1 if results <= len(calls) else len(lines)
    end = calls[results] + 1 if results < len(calls) else len(lines)
    return list(lines[begin:end])


def _pieces(line: Line, asked: Conversation) -> Iterator[Piece]:
    word, text = line
    match word:
        case "say":
            yield from _words(text)
        case "think":
            yield from (Say(piece.text, thought=True) for piece in _words(text))
        case "stream":
            count, _, pause = text.partition(" ")
            yield from (Say(f"word-{number} ", float(pause or 0) / 1000) for number in range(1, int(count) + 1))
        case "stall":
            yield Say("", float(text))
        case "recall":
            yield from _words(" | ".join(asked.users))
        case "run":
            yield _run(asked.tools, text)
        case "write":
            path, _, content = text.partition(" ")
            tool = _named(asked.tools, *_WRITERS)
            yield Call(tool, _arguments(tool, (("path", path), ("content", content))))
        case "call":
            name, _, arguments = text.partition(" ")
            yield Call(_named(asked.tools, name), json.loads(arguments or "{}"))
        case "cut":
            yield Cut()


def _fail(text: str) -> Fail:
    status, _, times = text.partition(" ")
    return Fail(int(status), int(times) if times else None)


def _closing(asked: Conversation) -> str:
    """What is said where no script says anything."""
    if asked.results:
        return f"The tool said: {asked.results[-1][:RESULT_CHARACTERS]}"
    last = asked.users[-1] if asked.users else ""
    return f"You said: {last[:RESULT_CHARACTERS]} (message {len(asked.users)})"


def _words(text: str) -> Iterator[Say]:
    yield from (Say(word) for word in re.findall(r"\S+\s*|\s+", text))


def _run(tools: Sequence[Tool], command: str) -> Call:
    tool = _named(tools, *_SHELLS)
    return Call(tool, _arguments(tool, (("cmd", command), ("command", command), ("description", "as asked"))))


def _arguments(tool: Tool, values: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Arguments for the parameters that the tool has, by what is in their names; a list where it wants one."""
    properties = tool.schema.get("properties")
    names: Mapping[str, Any] = properties if isinstance(properties, dict) else {}
    found: dict[str, Any] = {}
    for wanted, value in values:
        name = next((name for name in names if name == wanted or name.lower().endswith(wanted)), None)
        if name is None or name in found:
            continue
        schema = names[name] if isinstance(names[name], dict) else {}
        found[name] = ["bash", "-c", value] if schema.get("type") == "array" else value
    return found or {values[0][0]: values[0][1]}


def _named(tools: Sequence[Tool], *names: str) -> Tool:
    """The tool of one of these names, or whose name ends with one, or has it in it."""
    for name in names:
        for fits in (str.__eq__, str.endswith, str.__contains__):
            for tool in tools:
                if fits(tool.full_name.lower(), name.lower()):
                    return tool
    raise ValueError(f"no tool is like {' or '.join(names)}; there are {', '.join(tool.full_name for tool in tools)}")
