"""What a prompt asks for: its lines as steps."""

import json
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

Json = Mapping[str, object]


class Say(NamedTuple):
    """Talk: lines that are no directive."""

    text: str


class Stream(NamedTuple):
    """`rate` is words a second, 0 for no pause."""

    words: int
    rate: float


class Think(NamedTuple):
    """Deltas of thought."""

    words: int


class ToolUse(NamedTuple):
    """A tool call; `ask` wants permission first."""

    name: str
    arguments: Json
    ask: bool = False


class Run(NamedTuple):
    """A shell command."""

    command: str


class LeaveChild(NamedTuple):
    """A process that nobody waits for."""

    seconds: float


class Sleep(NamedTuple):
    """A pause."""

    seconds: float


class Flood(NamedTuple):
    """That many deltas of `size` bytes."""

    deltas: int
    size: int


class WriteFile(NamedTuple):
    """A file to write."""

    path: str
    text: str


class ReadFile(NamedTuple):
    """A file to read."""

    path: str


class Extension(NamedTuple):
    """A request of Hearth's own to the client."""

    method: str
    params: Json


class AskTogether(NamedTuple):
    """What is begun at the same time: each goes on when its own request is answered."""

    uses: tuple[ToolUse | Extension | Run, ...]


class Told(NamedTuple):
    """A sentence of Hearth's about a request that was open when an earlier turn ended."""

    text: str


class Later(NamedTuple):
    """Something said so many seconds later, whether or not the turn still runs; with `ask` a tool call that wants
    permission."""

    seconds: float
    text: str
    ask: bool = False


class Fail(NamedTuple):
    """A JSON-RPC error."""

    message: str


class Crash(NamedTuple):
    """The end of the process; `code` None is SIGKILL."""

    code: int | None


class Plain(NamedTuple):
    """A directive that is only a word: plan, commands, usage, empty, cancelled-unasked, garbage, hang, hang-hard,
    ignore-eof."""

    word: str


Step = (
    Say
    | Stream
    | Think
    | ToolUse
    | AskTogether
    | Told
    | Run
    | LeaveChild
    | Sleep
    | Flood
    | WriteFile
    | ReadFile
    | Extension
    | Later
    | Fail
    | Crash
    | Plain
)


def _approved(name: str, text: str) -> Step:
    """A call that a person approved while no agent was there: it is asked for once more, as real agents do."""
    arguments = _object(text)
    instead, times = arguments.get("instead"), arguments.get("asks")
    use = ToolUse(name, instead if isinstance(instead, dict) else arguments, ask=True)
    return AskTogether((use,) * (times if isinstance(times, int) else 1))


_NUMBER = r"\d+(?:\.\d+)?"
_JSON = r"(?:\s+(\{.*\}))?"
_PATTERNS: list[tuple[re.Pattern[str], Callable[..., Step]]] = [
    (re.compile(pattern), make)
    for pattern, make in (
        (rf"stream (\d+) words?(?: at ({_NUMBER})/s)?", lambda n, rate: Stream(int(n), float(rate or 0))),
        (r"think (\d+)", lambda n: Think(int(n))),
        (rf"tool (\S+){_JSON}", lambda name, text: ToolUse(name, _object(text))),
        (rf"ask (\S+){_JSON}", lambda name, text: ToolUse(name, _object(text), ask=True)),
        (rf"parallel ask (\S+){_JSON}", lambda name, text: AskTogether((ToolUse(name, _object(text), ask=True),))),
        (rf"parallel hearth-ask{_JSON}", lambda text: AskTogether((Extension("_hearth/ask", _object(text)),))),
        (
            rf"parallel hearth-client-tool{_JSON}",
            lambda text: AskTogether((Extension("_hearth/client_tool", _object(text)),)),
        ),
        (r"parallel run (.+)", lambda command: AskTogether((Run(command),))),
        (r"The user approved (\S+) with (\{.*\}); run it once\.", _approved),
        (r"(The user denied \S+; do not retry it\.)", Told),
        (r"(The user answered .+)", Told),
        (r"(The client ran .+)", Told),
        (r"(.+: approved, result unknown; check before repeating\.)", Told),
        (r"(Nobody answered .+)", Told),
        (r"run (.+)", Run),
        (rf"leave-child ({_NUMBER})", lambda s: LeaveChild(float(s))),
        (rf"sleep ({_NUMBER})", lambda s: Sleep(float(s))),
        (r"flood (\d+) (\d+)", lambda n, size: Flood(int(n), int(size))),
        (r"line (\d+)", lambda size: Flood(1, int(size))),
        (r"fs-write (\S+)(?: (.*))?", lambda path, text: WriteFile(path, text or "")),
        (r"read (\S+)", ReadFile),
        (rf"hearth-ask{_JSON}", lambda text: Extension("_hearth/ask", _object(text))),
        (rf"hearth-client-tool{_JSON}", lambda text: Extension("_hearth/client_tool", _object(text))),
        (rf"later ({_NUMBER}) (.+)", lambda s, text: Later(float(s), text)),
        (rf"later-ask ({_NUMBER}) (\S+)", lambda s, name: Later(float(s), name, ask=True)),
        (r"error (.+)", Fail),
        (r"crash (\d+)", lambda code: Crash(int(code))),
        (r"crash-silent", lambda: Crash(None)),
        (r"(plan|commands|usage|empty|cancelled-unasked|garbage|hang|hang-hard|ignore-eof)", Plain),
    )
]
_REMEMBER = re.compile(r"\bremember (?:that )?my ([\w-]+) is ([\w-]+)", re.IGNORECASE)
_RECALL = re.compile(r"\bwhat(?:'s| is) my ([\w-]+)", re.IGNORECASE)
_WHO = re.compile(r"\bwho are you\b", re.IGNORECASE)


def parse(text: str) -> list[Step]:
    """The steps of a prompt's text, in order. A line that only looks like a directive is talk."""
    steps: list[Step] = []
    for line in text.splitlines():
        step = _parse_line(line.strip())
        last = steps[-1] if steps else None
        if isinstance(step, Say) and isinstance(last, Say):
            steps[-1] = Say(f"{last.text}\n{step.text}")
        elif isinstance(step, AskTogether) and isinstance(last, AskTogether):
            steps[-1] = AskTogether(last.uses + step.uses)
        elif step is not None:
            steps.append(step)
    return steps


def facts_in(text: str) -> dict[str, str]:
    """What `text` asks to remember: name of the thing → its value."""
    return {thing.lower(): value for thing, value in _REMEMBER.findall(text)}


def reply(text: str, facts: Mapping[str, str], identity: str) -> str:
    """The answer to talk. `facts` already hold what the text itself asks to remember."""
    parts = [f"I will remember that your {thing.lower()} is {value}." for thing, value in _REMEMBER.findall(text)]
    for thing in _RECALL.findall(text):
        value = facts.get(thing.lower())
        parts.append(f"Your {thing.lower()} is {value}." if value else f"I do not know your {thing.lower()}.")
    if _WHO.search(text):
        parts.append(identity)
    return " ".join(parts) or f"You said: {text}"


def _parse_line(line: str) -> Step | None:
    if not line:
        return None
    for pattern, make in _PATTERNS:
        match = pattern.fullmatch(line)
        if match:
            try:
                return make(*match.groups())
            except ValueError:
                break
    return Say(line)


def _object(text: str | None) -> Json:
    value: object = json.loads(text) if text else {}
    if not isinstance(value, dict):
        raise ValueError("not a JSON object")
    return value
