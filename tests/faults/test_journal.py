"""Journals tell what happened in its order, and survive a kill in the middle of a line."""

from __future__ import annotations

from pathlib import Path

from hearth.history.v1 import history_pb2
from hearth.types.v1 import event_pb2
from tests.checkers.pieces import event, text_frame
from tests.faults.journal import Journal, Reading

KEY = ("p", "s")
APPENDED = history_pb2.AppendResult(outcome=history_pb2.APPEND_OUTCOME_APPENDED, sequence=7)


async def test_what_was_sent_and_answered_is_told(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "a")
    reading = Reading([tmp_path / "a", tmp_path / "not yet there"])
    first, second = journal.sent(KEY, event(1), event(2), line="producer")
    (third,) = journal.sent(KEY, event(3), line="producer")
    assert [append.result for append in reading.more().appends] == [None] * 3
    journal.acknowledged(second, APPENDED)
    corrected = event(3, entity_id="corrected")
    journal.acknowledged(third, APPENDED, corrected)
    journal.flush()
    journal.frame(KEY, ("run", 2), text_frame(0))
    journal.frame(KEY, ("run", 1), text_frame(1))
    journal.close()
    told = reading.more()
    assert [append.event for append in told.appends] == [event(1), event(2), corrected]
    assert [append.result for append in told.appends] == [None, APPENDED, APPENDED]
    assert told.appends[0].request == told.appends[1].request != told.appends[2].request
    assert told.appends[1].began < told.appends[2].began < told.appends[1].answered
    assert [(publish.epoch, len(publish.frames)) for publish in told.publishes] == [(2, 1), (1, 1)]
    assert told.runs[KEY] == [("run", 1), ("run", 2)]
    assert told.acknowledged == 2
    assert first < second < third


async def test_half_a_line_is_nothing(tmp_path: Path) -> None:
    path = tmp_path / "a"
    journal = Journal(path)
    journal.sent(KEY, event(1), line="producer")
    journal.close()
    whole = path.read_bytes()
    path.write_bytes(whole + whole[: len(whole) // 2])
    reading = Reading([path])
    assert len(reading.more().appends) == 1
    again = Journal(path)
    (number,) = again.sent(KEY, event_pb2.Event(event_id="x"), line="producer")
    again.acknowledged(number, APPENDED)
    again.close()
    assert [append.event.event_id for append in reading.more().appends] == [event(1).event_id, "x"]
