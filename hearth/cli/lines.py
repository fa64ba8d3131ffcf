"""What a line that somebody types into a chat means. Pure."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from hearth.client import decided, told
from hearth.session.v1 import session_pb2 as control_pb2
from hearth.types.v1 import event_pb2

HELP = """\
a line               a message; while the agent works it waits in the queue
/steer TEXT          stop what runs, and run this next
/stop                stop what runs (Ctrl-C does it too)
/queue               what waits; /remove N, /edit N TEXT, /now N for one of it, /resume after a stop
/gates               what the agent asks; y or n answers the oldest, y N or y all others, /answer TEXT a question
/kill                end everything of this session, and delete its sandbox
/quit                leave; the agent goes on (an empty line leaves too when it does not work)
//TEXT               a message that begins with a slash"""


@dataclasses.dataclass(frozen=True, slots=True)
class Send:
    """A message for the agent. `steer`: instead of what runs."""

    text: str
    steer: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Answer:
    """Answers to what the agent asked."""

    answers: tuple[control_pb2.InteractionAnswer, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """Something done to the input at this place of the queue, from 1: `remove`, `edit` or `now`."""

    what: str
    place: int
    text: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Do:
    """A command without arguments: `stop`, `kill`, `queue`, `gates`, `resume`, `help` or `quit`."""

    what: str


@dataclasses.dataclass(frozen=True, slots=True)
class Wrong:
    """Nothing that is understood, and why."""

    why: str


Action = Send | Answer | Change | Do | Wrong

_PLAIN = frozenset({"stop", "kill", "queue", "gates", "resume", "help", "quit"})
_DECISIONS = {"y": True, "yes": True, "allow": True, "n": False, "no": False, "deny": False}


def meaning(line: str, asked: Sequence[event_pb2.InteractionRequested]) -> Action:
    """What to do about a line that is not empty. `asked`: what nobody has answered, oldest first."""
    if line.startswith("//"):
        return Send(line[1:])
    if line.startswith("/"):
        word, _, rest = line[1:].partition(" ")
        return _command(word, rest.strip(), asked)
    if not asked:
        return Send(line)
    if asked[0].kind != event_pb2.INTERACTION_KIND_APPROVAL:
        return Answer((_spoken(asked[0], line),))
    word, _, rest = line.lower().partition(" ")
    if word in ("y", "yes", "n", "no") and (not rest.strip() or _chosen(rest.strip(), asked)):
        return _decide(_DECISIONS[word], rest.strip(), asked)
    return Send(line)


def _command(word: str, rest: str, asked: Sequence[event_pb2.InteractionRequested]) -> Action:
    action: Action
    match word:
        case _ if word in _PLAIN:
            action = Wrong(f"/{word} takes nothing behind it") if rest else Do(word)
        case "steer":
            action = Send(rest, steer=True) if rest else Wrong("/steer TEXT: say what is to run instead")
        case "allow" | "deny":
            action = _decide(_DECISIONS[word], rest, asked)
        case "answer":
            action = _answer(rest, asked)
        case "remove" | "now" | "edit":
            action = _change(word, rest)
        case _:
            action = Wrong(f"/{word} is no command; /help lists them, //{word} sends it to the agent")
    return action


def _change(word: str, rest: str) -> Action:
    place, _, text = rest.partition(" ")
    if not place.isdigit() or bool(text.strip()) != (word == "edit"):
        return Wrong(f"/{word} N{' TEXT' if word == 'edit' else ''}: N is a place in the /queue")
    return Change(word, int(place), text.strip())


def _decide(allowed: bool, which: str, asked: Sequence[event_pb2.InteractionRequested]) -> Action:
    approvals = [request for request in asked if request.kind == event_pb2.INTERACTION_KIND_APPROVAL]
    if not approvals:
        return Wrong("the agent asks for nothing that could be allowed or denied")
    chosen = _chosen(which, asked) if which else approvals[:1]
    if not chosen or any(request not in approvals for request in chosen):
        return Wrong("give the number of one that /gates lists and that is a permission, or `all`")
    return Answer(tuple(decided(request.interaction_id, allowed=allowed) for request in chosen))


def _chosen(which: str, asked: Sequence[event_pb2.InteractionRequested]) -> Sequence[event_pb2.InteractionRequested]:
    """Those that a number, from 1, or `all` permissions means; none when it means nothing."""
    if which == "all":
        return [request for request in asked if request.kind == event_pb2.INTERACTION_KIND_APPROVAL]
    return asked[int(which) - 1 : int(which)] if which.isdigit() and int(which) else []


def _answer(rest: str, asked: Sequence[event_pb2.InteractionRequested]) -> Action:
    open_ones = [request for request in asked if request.kind != event_pb2.INTERACTION_KIND_APPROVAL]
    if not open_ones:
        return Wrong("the agent asks no question")
    if not rest:
        return Wrong("/answer TEXT: say what to answer")
    return Answer((_spoken(open_ones[0], rest),))


def _spoken(request: event_pb2.InteractionRequested, text: str) -> control_pb2.InteractionAnswer:
    return told(request.interaction_id, answer_json(text, request))


def answer_json(text: str, request: event_pb2.InteractionRequested) -> str:
    """A typed answer as JSON text: as it is where it is JSON of something that is wanted, else as a string."""
    try:
        value = json.loads(text)
    except ValueError:
        return json.dumps(text, ensure_ascii=False)
    # Somebody who answers "42" to a question in words means the word.
    wanted = bool(request.answer_schema_json) or request.kind == event_pb2.INTERACTION_KIND_CLIENT_TOOL
    return text if wanted or isinstance(value, str) else json.dumps(text, ensure_ascii=False)
