"""What a load process wrote down: each line is with the system before what it tells of can be seen by anybody.

Lines are JSON. An acknowledgement counts once it is on the disk. A process that is killed leaves at most half a line.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hearth.history.v1 import history_pb2
from hearth.types.v1 import event_pb2, frame_pb2
from tests.support.recording import Append, Key, Publish

Run = tuple[str, int]


class Journal:
    """The file of one process; `note` writes, `acknowledged` also has it on disk before the loop goes on."""

    def __init__(self, path: Path) -> None:
        # Half a line of a life before this one must not swallow the first line of this one.
        self._file = path.open("ab", buffering=0)
        self._file.write(b"\n")
        self._numbers = int(time.monotonic() * 1_000_000) * 1_000
        self._answers: list[bytes] = []

    def sent(self, session: Key, *events: event_pb2.Event, line: str) -> list[int]:
        """Events are about to be sent together; their numbers."""
        numbers = []
        request = self._number()
        for event in events:
            numbers.append(self._number())
            self._write(k="sent", n=numbers[-1], s=session, r=request, l=line, e=_text(event.SerializeToString()))
        return numbers

    def acknowledged(self, number: int, result: history_pb2.AppendResult, event: event_pb2.Event | None = None) -> None:
        """The answer to an event; `event` is given where it may have been corrected before it was taken."""
        content = {} if event is None else {"e": _text(event.SerializeToString())}
        self._answers.append(_line(k="ack", n=number, o=_text(result.SerializeToString()), **content))
        if len(self._answers) == 1:
            asyncio.get_running_loop().call_soon(self.flush)

    def frame(self, session: Key, run: Run, frame: frame_pb2.Frame) -> None:
        """A frame got its index."""
        self._write(k="frame", s=session, x=run[0], p=run[1], f=_text(frame.SerializeToString()))

    def flush(self) -> None:
        """Have the answers on disk."""
        if self._answers:
            answers, self._answers = self._answers, []
            self._file.write(b"".join(answers))
            os.fdatasync(self._file.fileno())

    def close(self) -> None:
        """Write the rest."""
        self.flush()
        self._file.close()

    def _write(self, **fields: Any) -> None:
        self._file.write(_line(**fields))

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers


@dataclass
class Told:
    """What journals tell, in the order in which it happened in each of them."""

    appends: list[Append] = field(default_factory=list)
    publishes: list[Publish] = field(default_factory=list)
    # By session, ascending by epoch: who wrote frames.
    runs: dict[Key, list[Run]] = field(default_factory=lambda: defaultdict(list))
    acknowledged: int = 0
    ticks: int = 0


class Reading:
    """Follows the journals of processes that still write."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self.told = Told()
        self._offsets = dict.fromkeys(paths, 0)
        self._open: dict[tuple[Path, int], Append] = {}
        self._frames: dict[tuple[Key, Run], list[frame_pb2.Frame]] = {}

    def more(self) -> Told:
        """Take what was written since."""
        for path, offset in self._offsets.items():
            if not path.exists():
                continue
            with path.open("rb") as file:
                file.seek(offset)
                content = file.read()
            whole = content[: content.rfind(b"\n") + 1]
            self._offsets[path] += len(whole)
            for line in whole.split(b"\n"):
                if line.startswith(b"{") and line.endswith(b"}"):
                    self._take(path, json.loads(line))
        return self.told

    def _take(self, path: Path, found: dict[str, Any]) -> None:
        told = self.told
        told.ticks += 1
        match found["k"]:
            case "sent":
                event = event_pb2.Event.FromString(base64.b64decode(found["e"]))
                append = Append(_key(found["s"]), event, told.ticks, found["r"], line=found["l"], began_at=found["t"])
                self._open[path, found["n"]] = append
                told.appends.append(append)
            case "ack":
                append = self._open.pop((path, found["n"]))
                append.answered, append.answered_at = told.ticks, found["t"]
                append.result = history_pb2.AppendResult.FromString(base64.b64decode(found["o"]))
                if "e" in found:
                    append.event.ParseFromString(base64.b64decode(found["e"]))
                told.acknowledged += 1
            case "frame":
                key, run = _key(found["s"]), (found["x"], found["p"])
                if (key, run) not in self._frames:
                    frames = self._frames[key, run] = []
                    told.publishes.append(Publish(key, *run, frames))
                    told.runs[key].append(run)
                    told.runs[key].sort(key=lambda run: run[1])
                self._frames[key, run].append(frame_pb2.Frame.FromString(base64.b64decode(found["f"])))


def _line(**fields: Any) -> bytes:
    return json.dumps({**fields, "t": time.monotonic()}).encode() + b"\n"


def _text(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _key(found: list[str]) -> Key:
    return found[0], found[1]
