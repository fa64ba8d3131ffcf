"""Sessions: what is remembered of a conversation, kept on the disk."""

import json
import os
import re
from pathlib import Path
from typing import TypedDict, cast
from uuid import uuid4

TEXT_CHARACTERS = 64 * 1024


class Turn(TypedDict):
    """A prompt and what was said to it (the first 64 Ki characters)."""

    number: int
    user: str
    agent: str
    stop_reason: str | None


class State(TypedDict):
    """A session as its file holds it. `always` names the tools that need no more permission."""

    id: str
    cwd: str
    turns: list[Turn]
    facts: dict[str, str]
    always: list[str]


class Session:
    """A session that this process knows: created by it, or loaded."""

    def __init__(self, state: State, directory: Path, *, loaded: bool) -> None:
        self.state = state
        self.loaded = loaded
        self.turns_loaded = len(state["turns"])
        self.turns_in_memory = 0
        self._path = directory / f"{state['id']}.json"

    @property
    def id(self) -> str:
        """The session id."""
        return self.state["id"]

    def begin(self, user: str, facts: dict[str, str]) -> Turn:
        """Start a turn; it is on the disk when this returns, so a crash leaves the user's words."""
        turn = Turn(number=len(self.state["turns"]) + 1, user=user[:TEXT_CHARACTERS], agent="", stop_reason=None)
        self.state["turns"].append(turn)
        self.state["facts"].update(facts)
        self.turns_in_memory += 1
        self.save()
        return turn

    def finish(self, turn: Turn, text: str, stop_reason: str) -> None:
        """Keep what was said, and how the turn ended."""
        turn["agent"] = text[:TEXT_CHARACTERS]
        turn["stop_reason"] = stop_reason
        self.save()

    def save(self) -> None:
        """Replace the file as a whole: a crash in the middle leaves the old one."""
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}.tmp")
        temporary.write_text(json.dumps(self.state), encoding="utf-8")
        temporary.replace(self._path)


class Sessions:
    """All sessions below a directory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory / "sessions"
        self._known: dict[str, Session] = {}

    def create(self, cwd: str) -> Session:
        """A new session. Raises OSError when the directory cannot be written."""
        self._directory.mkdir(parents=True, exist_ok=True)
        state = State(id=f"scripted-{uuid4()}", cwd=cwd, turns=[], facts={}, always=[])
        session = self._known[state["id"]] = Session(state, self._directory, loaded=False)
        session.save()
        return session

    def get(self, session_id: str) -> Session | None:
        """A session that this process created or loaded."""
        return self._known.get(session_id)

    def load(self, session_id: str, cwd: str) -> Session | None:
        """Read a session from the disk, from now on with this directory; None when there is no such session."""
        path = self._directory / f"{session_id}.json"
        if not re.fullmatch(r"[\w-]+", session_id) or not path.is_file():
            return None
        state = cast(State, json.loads(path.read_text(encoding="utf-8")))
        state["cwd"] = cwd
        session = self._known[session_id] = Session(state, self._directory, loaded=True)
        return session
