"""L1 signalled: a reader is told of each frame it loses, whole texts are whole, and no frame comes too late."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from hearth.relay.v1 import relay_pb2
from hearth.types.v1 import event_pb2, frame_pb2
from tests.checkers.verdict import Verdict
from tests.support.recording import ENDINGS, Connection, Key, Log, Reader, Recording, gap_range, runner, text_of

_OF_FRAMES = frozenset({"frame", "gap", "reset"})
# Frames by (execution, epoch) and index, each as often as another content was sent under it.
_Sent = dict[tuple[str, int], dict[int, list[frame_pb2.Frame]]]


def check(recording: Recording) -> Verdict:
    """Frames of each connection ascend without a hole that was not told, in their place between the events.

    Where it is known what was published, only that is delivered, unchanged or joined, and only that is told as lost.
    Where the log is known, what stands before the place at which a reader began counts as well.
    """
    verdict = Verdict()
    sent = _sent(recording)
    for reader in recording.readers:
        _reader(reader, verdict)
        if reader.session in sent:
            _true(reader, sent[reader.session], verdict)
        if reader.session in recording.logs:
            _in_place(reader, recording.logs[reader.session], verdict)
    return verdict


def _reader(reader: Reader, verdict: Verdict) -> None:
    for number, connection in enumerate(reader.connections):
        where = f"{reader.session} connection {number}"
        if connection.events_only:
            found = any(item.WhichOneof("item") in _OF_FRAMES for item in connection.items)
            verdict.expect(not found, f"{where}: frames, though only events were asked for")
            continue
        frames = _Frames(from_start=connection.after is not None and connection.after.sequence == 0)
        for item in connection.items:
            if item.WhichOneof("item") in ("event", *_OF_FRAMES, "ready"):
                verdict.also([f"{where}: {trouble}" for trouble in frames.apply(item)])


@dataclass
class _Track:
    """The frames of one execution as one connection saw them."""

    epoch: int
    # Lowest index that may come; the index that must come next if `strict`.
    next: int = 0
    # An index may be left out once more: what was withheld from a late joiner.
    strict: bool = False
    ended: bool = False
    gaps: int = 0
    held: bool = False
    texts: dict[str, str] = field(default_factory=dict)
    completed: set[str] = field(default_factory=set)


class _Frames:
    """Follows the frames of one connection."""

    def __init__(self, *, from_start: bool) -> None:
        self._from_start = from_start
        self._ready = False
        self._tracks: dict[str, _Track] = {}

    def apply(self, item: relay_pb2.Item) -> list[str]:
        """What is wrong with the next item."""
        match item.WhichOneof("item"):
            case "event":
                return self._event(item.event.event)
            case "frame":
                return self._frame(item.frame)
            case "gap":
                return self._gap(item.gap)
            case "reset":
                return self._reset(item.reset)
            case "ready":
                self._ready = True
        return []

    def _event(self, event: event_pb2.Event) -> list[str]:
        if not runner(event):
            return []
        if event.type == "execution.started":
            self._tracks[event.execution_id] = _Track(event.epoch, strict=self._ready)
            return []
        track = self._tracks.get(event.execution_id)
        if track is None:
            track = self._tracks[event.execution_id] = _Track(event.epoch)
        wrong: list[str] = []
        if event.epoch > track.epoch:
            if track.held and event.type not in ENDINGS:
                wrong.append(f"epoch {event.epoch} without a reset, frames of {track.epoch} are held")
            track.epoch, track.next = event.epoch, 0
        if event.HasField("frames_through") and event.epoch == track.epoch:
            if track.strict and track.next <= event.frames_through:
                wrong.append(f"{event.type} covers frames to {event.frames_through}, told or got to {track.next - 1}")
            track.next = max(track.next, event.frames_through + 1)
        if event.type == "message.completed":
            wrong += self._message(event.message_completed, track)
        if event.type in ("message.completed", "tool.completed"):
            track.completed.add(event.entity_id)
        track.ended = track.ended or event.type in ENDINGS
        return wrong

    def _message(self, message: event_pb2.MessageCompleted, track: _Track) -> list[str]:
        got = track.texts.get(message.message_id)
        whole = text_of(message)
        if got is not None and not track.gaps and got != whole:
            return [f"message {message.message_id}: frames add up to {got!r}, it is {whole!r}, and no gap was told"]
        return []

    def _frame(self, item: relay_pb2.FrameItem) -> list[str]:
        frame = item.frame
        track = self._tracks.get(item.execution_id)
        if track is None:
            if self._from_start:
                return [f"frame {frame.frame_index} before its execution started"]
            track = self._tracks[item.execution_id] = _Track(item.epoch)
        wrong: list[str] = []
        if track.ended:
            wrong.append(f"frame {frame.frame_index} after the ending")
        if frame.entity_id in track.completed:
            wrong.append(f"frame {frame.frame_index} after {frame.entity_id} was complete")
        if item.epoch != track.epoch:
            if item.epoch < track.epoch or track.held:
                wrong.append(f"frame of epoch {item.epoch} where {track.epoch} is")
            track.epoch, track.next, track.held = item.epoch, 0, False
        if frame.frame_index < track.next:
            wrong.append(f"frame {frame.frame_index} where {track.next} may come")
        if track.strict and frame.frame_index > track.next:
            wrong.append(f"frame {frame.frame_index} where {track.next} is next, and no gap was told")
        through = _through(frame)
        if through < frame.frame_index:
            wrong.append(f"frame {frame.frame_index} merged through {through}")
        track.next, track.held = through + 1, True
        track.strict = track.strict or self._ready
        delta = frame.text_delta.text if frame.HasField("text_delta") else frame.thought_delta.text
        track.texts[frame.entity_id] = track.texts.get(frame.entity_id, "") + delta
        return wrong

    def _gap(self, gap: relay_pb2.Gap) -> list[str]:
        first, last = gap_range(gap)
        track = self._tracks.get(gap.execution_id)
        if track is None:
            if self._from_start:
                return [f"gap {first}-{last} before its execution started"]
            track = self._tracks[gap.execution_id] = _Track(gap.epoch)
        wrong = []
        if gap.epoch > track.epoch:
            if track.held:
                wrong.append(f"gap of epoch {gap.epoch} without a reset, frames of {track.epoch} are held")
            track.epoch, track.next = gap.epoch, 0
        if first > last or (first < track.next and track.strict):
            wrong.append(f"gap {first}-{last} where {track.next} is next")
        if track.ended:
            wrong.append(f"gap {first}-{last} after the ending")
        track.gaps += 1
        track.next = max(track.next, last + 1)
        return wrong

    def _reset(self, reset: relay_pb2.Reset) -> list[str]:
        track = self._tracks.get(reset.execution_id)
        if track is None or not track.held:
            return ["reset for a reader that holds no frames"]
        if reset.epoch <= track.epoch:
            return [f"reset to epoch {reset.epoch} at {track.epoch}"]
        self._tracks[reset.execution_id] = _Track(reset.epoch, strict=True)
        return []


def _through(frame: frame_pb2.Frame) -> int:
    return frame.merged_through if frame.HasField("merged_through") else frame.frame_index


# --- against the log ---


@dataclass
class _Before:
    """What the events up to a place say about frames."""

    log: Log
    at: int = 0
    newest: tuple[int, str] = (0, "")
    ended: set[str] = field(default_factory=set)
    completed: set[tuple[str, str]] = field(default_factory=set)
    # Highest frames_through by (execution, epoch).
    covered: dict[tuple[str, int], int] = field(default_factory=dict)

    def move(self, sequence: int) -> None:
        """Take the events up to `sequence` into account."""
        while self.at < sequence:
            self.at += 1
            item = self.log.at(self.at)
            if item is not None and runner(item.event):
                self._fold(item.event)

    def _fold(self, event: event_pb2.Event) -> None:
        self.newest = max(self.newest, (event.epoch, event.execution_id))
        if event.type in ENDINGS:
            self.ended.add(event.execution_id)
        if event.type in ("message.completed", "tool.completed"):
            self.completed.add((event.execution_id, event.entity_id))
        if event.HasField("frames_through"):
            name = (event.execution_id, event.epoch)
            self.covered[name] = max(self.covered.get(name, -1), event.frames_through)

    def wrong(self, item: relay_pb2.FrameItem, *, live: bool) -> str:
        """What is wrong with a frame here; empty when nothing is.

        A reader that came late gets frames that an event covers already, of what is not complete yet; but not live.
        """
        index = item.frame.frame_index
        if item.execution_id in self.ended:
            return f"frame {index} of an execution that ended at or before {self.at}"
        if (item.execution_id, item.frame.entity_id) in self.completed:
            return f"frame {index} of {item.frame.entity_id}, which was complete at or before {self.at}"
        if item.epoch < self.newest[0]:
            return f"frame {index} of epoch {item.epoch}, at {self.at} it was {self.newest[0]}"
        if live and index <= self.covered.get((item.execution_id, item.epoch), -1):
            return f"frame {index}, which an event at or before {self.at} covers"
        return ""


def _in_place(reader: Reader, log: Log, verdict: Verdict) -> None:
    """No frame comes after what supersedes it, also when that is an event that the reader had on another connection."""
    for number, connection in enumerate(reader.connections):
        before = _Before(log)
        live = False
        start = _start(connection)
        if start is None:
            continue
        before.move(start)
        for item in connection.items:
            if item.HasField("event"):
                before.move(item.event.cursor.sequence)
            elif item.HasField("ready"):
                live = True
            elif item.HasField("frame"):
                trouble = before.wrong(item.frame, live=live)
                verdict.expect(not trouble, f"{reader.session} connection {number}: {trouble}")


def _start(connection: Connection) -> int | None:
    """Where a connection began; None for one at the tail that never got so far."""
    if connection.after is not None:
        return connection.after.sequence
    return next((item.ready.through for item in connection.items if item.HasField("ready")), None)


# --- against what was published ---


def _sent(recording: Recording) -> dict[Key, _Sent]:
    found: dict[Key, _Sent] = {}
    for publish in recording.publishes:
        frames = found.setdefault(publish.session, {}).setdefault(
            (publish.execution_id, publish.epoch), defaultdict(list)
        )
        for frame in publish.frames:
            frames[frame.frame_index].append(frame)
    for append in recording.appends:
        # A frame that an event names was assigned, though it may never have been sent.
        event = append.event
        if append.session in found and event.HasField("frames_through"):
            frames = found[append.session].setdefault((event.execution_id, event.epoch), defaultdict(list))
            frames.setdefault(event.frames_through, [])
    return found


def _true(reader: Reader, sent: _Sent, verdict: Verdict) -> None:
    for number, connection in enumerate(reader.connections):
        where = f"{reader.session} connection {number}"
        for item in connection.items:
            if item.HasField("frame"):
                frames = sent.get((item.frame.execution_id, item.frame.epoch), {})
                verdict.expect(
                    _was_sent(item.frame.frame, frames),
                    f"{where}: frame {item.frame.frame.frame_index} of epoch {item.frame.epoch} was never sent so",
                )
            elif item.HasField("gap"):
                first, last = gap_range(item.gap)
                highest = max(sent.get((item.gap.execution_id, item.gap.epoch), {-1: []}))
                verdict.expect(last <= highest, f"{where}: gap {first}-{last}, only {highest} was assigned")


def _was_sent(got: frame_pb2.Frame, frames: dict[int, list[frame_pb2.Frame]]) -> bool:
    frame = frame_pb2.Frame()
    frame.CopyFrom(got)
    # The recording may be of what a producer was asked for, which stamped the time itself.
    frame.ClearField("occurred_at")
    if not frame.HasField("merged_through"):
        return frame in frames.get(frame.frame_index, [])
    parts = [frames.get(index, []) for index in range(frame.frame_index, frame.merged_through + 1)]
    if not all(parts):
        return False
    firsts = [part[0] for part in parts]
    kind = frame.WhichOneof("body")
    if any(part.entity_id != frame.entity_id or part.WhichOneof("body") != kind for part in firsts):
        return False
    if kind == "text_delta":
        return frame.text_delta.text == "".join(part.text_delta.text for part in firsts)
    return kind == "thought_delta" and frame.thought_delta.text == "".join(part.thought_delta.text for part in firsts)
