"""What a round looked like to each reader and in each log, as text files, for whoever has to understand a failure."""

from __future__ import annotations

from pathlib import Path

from hearth.relay.v1 import relay_pb2
from hearth.types.v1 import event_pb2
from tests.support.recording import Recording, gap_range


def write(recording: Recording, directory: Path) -> None:
    """One file for each reader and each log."""
    directory.mkdir(exist_ok=True)
    for number, reader in enumerate(recording.readers):
        lines = []
        for place, connection in enumerate(reader.connections):
            after = connection.after.sequence if connection.after is not None else "tail"
            lines.append(f"--- connection {place} after {after}")
            lines += [_item(item) for item in connection.items]
            if connection.refusal is not None:
                lines.append(f"ended with {connection.refusal.reason}: {connection.refusal.message}")
        (directory / f"{reader.session[1]}-{number}.reader").write_text("\n".join(lines) + "\n")
    for key, log in recording.logs.items():
        lines = [f"{item.cursor.sequence:6} {_event(item.event)}" for item in log.items]
        lines += [f" aside {_event(found.event)} for {found.reason}" for found in log.quarantined]
        (directory / f"{key[1]}.log").write_text("\n".join(lines) + "\n")


def _item(item: relay_pb2.Item) -> str:
    match item.WhichOneof("item"):
        case "event":
            return f"{item.event.cursor.sequence:6} {_event(item.event.event)}"
        case "frame":
            frame = item.frame.frame
            through = f"-{frame.merged_through}" if frame.HasField("merged_through") else ""
            return f"       frame {frame.frame_index}{through} of {frame.entity_id}, epoch {item.frame.epoch}"
        case "gap":
            return f"       gap {gap_range(item.gap)}, epoch {item.gap.epoch}"
    return f"       {str(item).strip()}".replace("\n", " ")


def _event(event: event_pb2.Event) -> str:
    through = f" covers {event.frames_through}" if event.HasField("frames_through") else ""
    return f"{event.type} {event.entity_id[:12]} of {event.execution_id[:8]}/{event.epoch}{through}"
