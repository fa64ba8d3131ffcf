"""Replies of one stream: joined where that saves messages, and never to one that is too large to be sent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import cast

from hearth.channel import MAX_MESSAGE_BYTES
from hearth.history.v1 import history_pb2, history_service_pb2
from hearth.types.v1 import event_pb2, session_pb2
from services.history import wire
from services.history.appending import AppendCall
from services.history.committer import Committer
from services.history.validate import CheckedSet
from services.history.work import Order, Submission

REQUESTS = 100


class Undecided:
    """A committer that has nothing to commit."""

    def submit(self, sets: Sequence[CheckedSet], order: Order) -> Submission:
        """Decided at once: no set holds an event that can be held."""
        submission = Submission(sets)
        assert submission.works(order, "") == []
        return submission


def wrong(number: int, *, count: int) -> wire.RawAppend:
    """A request for a session that nobody can have."""
    found = history_pb2.AppendSet(session=session_pb2.SessionKey(session="s"), events=[event_pb2.Event()] * count)
    request = history_service_pb2.AppendStreamRequest(number=number, sets=[found])
    return wire.parse_append_stream(request.SerializeToString())


async def responses(count: int) -> list[history_service_pb2.AppendStreamResponse]:
    """What is written for requests of so many events each."""

    async def requests() -> AsyncIterator[wire.RawAppend]:
        for number in range(1, REQUESTS + 1):
            yield wrong(number, count=count)

    async with AppendCall(cast("Committer", Undecided()), requests()) as call:
        await call._reading
        written = [response async for response in call.responses()]
    assert max(map(len, written)) < MAX_MESSAGE_BYTES / 2
    found = [history_service_pb2.AppendStreamResponse.FromString(response) for response in written]
    assert [reply.number for response in found for reply in response.replies] == list(range(1, REQUESTS + 1))
    return found


async def test_replies_that_say_much_go_in_several_messages() -> None:
    assert len(await responses(1_000)) == REQUESTS


async def test_short_ones_go_together() -> None:
    assert len(await responses(1)) == 1
