"""The running service answers as the pure ledger does, over random histories sent through two replicas in turn."""

from __future__ import annotations

import random

import pytest

from hearth.history.v1 import history_pb2
from hearth.types.v1 import event_pb2
from services.history import replies, wire
from services.history.ledger import Decision, Draft, LogState, Stored
from services.history.validate import check_set
from tests.checkers import check
from tests.support import events
from tests.support.history_client import Client
from tests.support.recording import Log, Recording

STEPS = 40


class Model:
    """A log that only the ledger's decisions make."""

    def __init__(self) -> None:
        self.state = LogState()
        self.stored: dict[str, Stored] = {}
        self.log: list[bytes] = []
        self.aside: list[bytes] = []

    def append(self, sent: history_pb2.AppendSet) -> list[history_pb2.AppendResult]:
        request = wire.parse_append(b"\x0a" + wire.varint(sent.ByteSize()) + sent.SerializeToString())
        checked = check_set(request.sets[0], "sets[0]")
        draft = Draft(self.state, self.stored)
        decided: list[Decision] = (
            draft.decide_set(checked.records)
            if checked.atomic
            else [draft.decide(record) for record in checked.records]
        )
        for sequence, record in draft.writes.appended:
            self.log.append(record.raw)
            self.stored[record.event_id] = Stored(record.digest, sequence)
        for record, reason, _ in draft.writes.quarantined:
            self.aside.append(record.raw)
            self.stored[record.event_id] = Stored(record.digest, 0, reason)
        self.state = draft.state
        return [replies.result(decision) for decision in checked.complete(decided)]


class Story:
    """Random but likely sets: runs that start, speak, are taken over and end, and everything again later."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.runs = [events.Run(1)]
        self.sent: list[event_pb2.Event] = []

    def event(self) -> event_pb2.Event:
        dice = self.random
        if self.sent and dice.random() < 0.15:
            again = event_pb2.Event()
            again.CopyFrom(dice.choice(self.sent))
            if dice.random() < 0.3:
                again.entity_id += "x"
            return again
        run = dice.choice(self.runs[-3:])
        made = dice.choices(
            [
                run.message,
                run.tool,
                run.started,
                run.completed,
                lambda: run.completed(counted=dice.randint(0, 4), incomplete=dice.choice(["", "lost"])),
                self.next_run,
                self.takeover,
                events.user_message,
                events.gap,
                self.malformed,
            ],
            [8, 3, 3, 1, 1, 2, 2, 3, 0.3, 0.5],
        )[0]()
        self.sent.append(made)
        return made

    def next_run(self) -> event_pb2.Event:
        self.runs.append(events.Run(self.runs[-1].epoch + self.random.randint(0, 2)))
        return self.runs[-1].started()

    def takeover(self) -> event_pb2.Event:
        self.runs.append(self.random.choice(self.runs).at(self.runs[-1].epoch + 1))
        return self.random.choice([self.runs[-1].lost, self.runs[-1].message])()

    def malformed(self) -> event_pb2.Event:
        event = events.user_message()
        event.type = "nothing"
        return event


@pytest.mark.parametrize("seed", range(6))
async def test_random_histories(history: Client, other: Client, seed: int) -> None:
    story, model, session = Story(seed), Model(), events.key()
    for _ in range(STEPS):
        made = [story.event() for _ in range(story.random.randint(1, 5))]
        sent = events.append_set(session, *made, atomic=story.random.random() < 0.3)
        expected = model.append(sent)
        client = story.random.choice([history, history, history, other])
        (answered,) = await client.append_sets(sent)
        assert list(answered.results) == expected
    items = await other.read(session)
    assert [item.event.SerializeToString() for item in items] == model.log
    quarantined = await history.quarantined(session)
    assert [found.event.SerializeToString() for found in quarantined] == model.aside
    (head,) = await other.heads(session)
    check(Recording(logs={(session.project, session.session): Log(items, quarantined, head)}))
    assert (head.head.sequence, head.epoch, head.execution_id, head.ended) == (
        model.state.head,
        model.state.epoch,
        model.state.execution_id,
        model.state.ended,
    )
