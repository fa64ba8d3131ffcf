"""The line of events to the history: order per session through every loss, fairness between sessions, holds, bounds."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hearth._appending import FEW_SESSIONS, REQUEST_BYTES, REQUEST_EVENTS, AppendQueue, Item, event_field
from hearth._pipeline import ProtocolViolation
from hearth._publishing import FrameBuffer, FrameQueue
from hearth.errors import CallError
from hearth.history.v1 import history_pb2, history_service_pb2
from hearth.types.v1 import event_pb2, session_pb2

AWAY = CallError(grpc.StatusCode.UNAVAILABLE, "away")
REFUSED = CallError(grpc.StatusCode.INVALID_ARGUMENT, "refused")
BROKEN = CallError(grpc.StatusCode.INTERNAL, "broken")


class Recorded(Item):
    """An item that writes down what happens to it; `again` settles are turned down first."""

    __slots__ = ("again", "failed", "name", "settled")

    def __init__(
        self, name: str, *, size: int = 0, count: int = 1, atomic: bool = False, barrier: bool = False
    ) -> None:
        event = event_pb2.Event(event_id=name, entity_id="x" * size).SerializeToString()
        super().__init__(event_field(event) * count, count, atomic=atomic, barrier=barrier)
        self.name = name
        self.settled: list[history_pb2.AppendResult] = []
        self.failed: Exception | None = None
        self.again = 0

    def settle(self, results: Sequence[history_pb2.AppendResult]) -> bool:
        if self.again:
            self.again -= 1
            return False
        self.settled = list(results)
        return True

    def fail(self, error: Exception) -> None:
        self.failed = error


def queue() -> AppendQueue:
    return AppendQueue(FrameQueue(gather=0.004))


def sent(request: bytes | None) -> history_service_pb2.AppendStreamRequest:
    assert request is not None
    return history_service_pb2.AppendStreamRequest.FromString(request)


def names(request: bytes | None) -> list[tuple[str, list[str]]]:
    return [(found.session.session, [event.event_id for event in found.events]) for found in sent(request).sets]


def answer(*requests: bytes | None, sequence: int = 1) -> history_service_pb2.AppendStreamResponse:
    response = history_service_pb2.AppendStreamResponse()
    for request in map(sent, requests):
        reply = response.replies.add(number=request.number)
        for found in request.sets:
            result = reply.sets.add()
            for _ in found.events:
                result.results.add(outcome=history_pb2.APPEND_OUTCOME_APPENDED, sequence=sequence)
    return response


def test_many_sessions_are_divided_among_the_requests_in_flight() -> None:
    line = queue()
    for number in range(4 * FEW_SESSIONS):
        line.add(("p", f"s{number}"), Recorded(f"{number}"))
        line.add(("p", f"s{number}"), Recorded(f"{number} again"))
    first, second = line.take(0.0), line.take(0.0)
    assert line.take(0.0) is None
    assert [found for request in (first, second) for found in names(request)] == [
        (f"s{number}", [f"{number}", f"{number} again"]) for number in range(4 * FEW_SESSIONS)
    ]
    assert len(sent(first).sets) == len(sent(second).sets) == 2 * FEW_SESSIONS
    # Those that come while one request is out go together when it is answered: the other one is still on its way.
    for number in range(2 * FEW_SESSIONS):
        line.add(("p", f"later{number}"), Recorded(f"later {number}"))
    line.received(answer(first), 0.0)
    assert len(sent(line.take(0.0)).sets) == 2 * FEW_SESSIONS


def test_few_sessions_go_in_one_request() -> None:
    line = queue()
    for number in range(FEW_SESSIONS):
        line.add(("p", f"s{number}"), Recorded(f"{number}"))
    assert len(sent(line.take(0.0)).sets) == FEW_SESSIONS
    assert line.take(0.0) is None


def test_it_sends_at_once_and_gathers_while_two_requests_are_unanswered() -> None:
    line = queue()
    assert line.add(("p", "a"), Recorded("1")) is True
    first = line.take(0.0)
    line.add(("p", "a"), Recorded("2"))
    second = line.take(0.0)
    assert line.add(("p", "a"), Recorded("3")) is False
    line.add(("p", "b"), Recorded("4"))
    line.add(("p", "a"), Recorded("5"))
    assert line.take(0.0) is None
    line.received(answer(first), 0.0)
    third = line.take(0.0)
    assert [names(first), names(second)] == [[("a", ["1"])], [("a", ["2"])]]
    assert names(third) == [("a", ["3", "5"]), ("b", ["4"])]
    assert [sent(found).number for found in (first, second, third)] == [1, 2, 3]


def test_several_replies_in_one_message_settle_their_items() -> None:
    line = queue()
    items = [Recorded("1"), Recorded("2")]
    line.add(("p", "a"), items[0])
    first = line.take(0.0)
    line.add(("p", "a"), items[1])
    second = line.take(0.0)
    line.received(answer(first, second, sequence=9), 0.0)
    assert [item.settled[0].sequence for item in items] == [9, 9]
    assert not line.pending


def test_what_was_not_answered_goes_again_in_order_and_as_the_same_bytes() -> None:
    line = queue()
    for name in ("1", "2"):
        line.add(("p", "a"), Recorded(name))
    first = line.take(0.0)
    line.add(("p", "a"), Recorded("3"))
    line.add(("p", "b"), Recorded("4"))
    line.take(0.0)
    line.add(("p", "a"), Recorded("5"))
    line.lost(AWAY, 0.0)
    again = line.take(0.0)
    assert sorted(names(again)) == [("a", ["1", "2", "3", "5"]), ("b", ["4"])]
    assert sent(again).number == 1
    [session] = [found for found in sent(again).sets if found.session.session == "a"]
    assert session.events[0] == sent(first).sets[0].events[0]
    assert line.resent == 4


def test_answered_requests_do_not_go_again() -> None:
    line = queue()
    line.add(("p", "a"), Recorded("1"))
    first = line.take(0.0)
    line.add(("p", "a"), Recorded("2"))
    line.take(0.0)
    line.received(answer(first), 0.0)
    line.lost(None, 0.0)
    assert names(line.take(0.0)) == [("a", ["2"])]


def test_atomic_sets_stay_apart_from_their_neighbours() -> None:
    line = queue()
    for item in (Recorded("1"), Recorded("2", count=2, atomic=True), Recorded("3"), Recorded("4")):
        line.add(("p", "a"), item)
    request = sent(line.take(0.0))
    assert [found.atomic for found in request.sets] == [False, True, False]
    assert [len(found.events) for found in request.sets] == [1, 2, 2]


def test_requests_keep_their_bounds_and_one_session_does_not_starve_another() -> None:
    line = queue()
    for number in range(REQUEST_EVENTS + 200):
        line.add(("p", "hot"), Recorded(str(number)))
    line.add(("p", "calm"), Recorded("calm"))
    first, second = line.take(0.0), line.take(0.0)
    assert sum(len(found.events) for found in sent(first).sets) == REQUEST_EVENTS
    assert ("calm", ["calm"]) in names(second)

    line = queue()
    for number in range(5):
        line.add(("p", "fat"), Recorded(str(number), size=1_000_000))
    requests = [line.take(0.0), line.take(0.0)]
    assert all(len(request or b"") <= REQUEST_BYTES + 1024 for request in requests)
    assert [len(sent(request).sets[0].events) for request in requests] == [3, 2]


def test_nothing_of_a_session_follows_a_barrier_until_it_is_settled() -> None:
    line = queue()
    line.add(("p", "a"), Recorded("before"))
    first = line.take(0.0)
    ending = Recorded("ending", barrier=True)
    ending.again = 1
    line.add(("p", "a"), ending)
    line.add(("p", "a"), Recorded("after"))
    second = line.take(0.0)
    assert names(second) == [("a", ["ending"])]
    line.received(answer(first), 0.0)
    assert line.take(0.0) is None, "an answer to something else does not lift the barrier"
    line.received(answer(second), 0.0)
    third = line.take(0.0)
    assert names(third) == [("a", ["ending"])], "it was turned down, so it goes again first"
    line.received(answer(third), 0.0)
    assert names(line.take(0.0)) == [("a", ["after"])]


def test_a_barrier_that_was_lost_on_the_way_still_is_one() -> None:
    line = queue()
    line.add(("p", "a"), Recorded("ending", barrier=True))
    line.add(("p", "a"), Recorded("after"))
    line.take(0.0)
    line.lost(AWAY, 0.0)
    again = line.take(0.0)
    assert names(again) == [("a", ["ending"])]
    assert line.take(0.0) is None
    line.received(answer(again), 0.0)
    assert names(line.take(0.0)) == [("a", ["after"])]


@pytest.mark.parametrize("wrong", ["number", "count", "nothing sent"])
def test_an_answer_that_does_not_fit_is_not_trusted(wrong: str) -> None:
    line = queue()
    line.add(("p", "a"), Recorded("1"))
    reply = answer(line.take(0.0))
    if wrong == "number":
        reply.replies[0].number = 7
    elif wrong == "count":
        reply.replies[0].sets[0].results.add()
    else:
        line.lost(None, 0.0)
    with pytest.raises(ProtocolViolation):
        line.received(reply, 0.0)


# Requests that fail through the fault of an event


def test_an_event_that_breaks_its_request_is_found_and_failed_alone() -> None:
    line = queue()
    items = {name: Recorded(name) for name in ("1", "bad", "3")}
    for session, name in (("a", "1"), ("b", "bad"), ("c", "3")):
        line.add(("p", session), items[name])
    line.take(0.0)
    line.lost(REFUSED, 0.0)
    order = []
    for _ in range(4):
        request = line.take(0.0)
        if request is None:
            break
        assert line.take(0.0) is None, "a suspect goes with nothing behind it"
        [(_, [name])] = names(request)
        order.append(name)
        if name == "bad":
            line.lost(REFUSED, 0.0)
        else:
            line.received(answer(request), 0.0)
    assert order == ["1", "bad", "3"]
    assert items["bad"].failed is REFUSED
    assert items["3"].settled
    assert not line.pending


def test_an_unclear_failure_is_tried_again_without_holding_up_other_sessions() -> None:
    line = queue()
    bad, good = Recorded("bad"), Recorded("good")
    line.add(("p", "a"), bad)
    line.add(("p", "b"), good)
    line.take(0.0)
    line.lost(BROKEN, 0.0)
    assert len(names(line.take(0.0))) == 2, "once may be an accident"
    line.lost(BROKEN, 0.0)
    assert names(line.take(0.0)) == [("a", ["bad"])]
    line.lost(BROKEN, 0.0)
    request = line.take(0.0)
    assert names(request) == [("b", ["good"])], "the suspect waits, the others do not"
    line.received(answer(request), 0.0)
    assert good.settled
    wait = line.next_time(0.0)
    assert wait is not None
    assert wait > 0.0
    request = line.take(wait)
    assert names(request) == [("a", ["bad"])]
    line.received(answer(request), 0.0)
    assert bad.settled
    assert bad.failed is None


def test_an_outage_accuses_nobody() -> None:
    line = queue()
    for session in "abc":
        line.add(("p", session), Recorded(session))
    line.take(0.0)
    line.lost(AWAY, 0.0)
    assert len(sent(line.take(0.0)).sets) == 3


# Frames before their event


def held_item(name: str, frames: FrameBuffer, through: int, until: float) -> Recorded:
    item = Recorded(name)
    item.frames, item.frames_through, item.hold_until = frames, through, until
    return item


def buffer() -> FrameBuffer:
    session = session_pb2.SessionKey(project="p", session="a")
    return FrameBuffer(session, session_pb2.ExecutionRef(), limit=8, fenced=lambda _: None)


def test_an_event_waits_for_the_frames_before_it_but_its_neighbours_do_not() -> None:
    line, frames = queue(), buffer()
    for index in range(3):
        frames.add(index, b"frame")
    line.add(("p", "a"), held_item("held", frames, 1, 0.05))
    line.add(("p", "b"), Recorded("free"))
    assert names(line.take(0.0)) == [("b", ["free"])]
    assert line.holding
    assert line.next_time(0.0) == 0.05
    frames.taken(0)
    assert line.take(0.01) is None
    frames.taken(1)
    assert names(line.take(0.02)) == [("a", ["held"])]
    assert len(frames) == 1, "frames behind the event stay"


def test_the_wait_ends_in_time_and_gives_the_frames_up() -> None:
    line, frames = queue(), buffer()
    frames.add(0, b"frame")
    line.add(("p", "a"), held_item("held", frames, 0, 0.05))
    assert line.take(0.049) is None
    assert names(line.take(0.05)) == [("a", ["held"])]
    assert len(frames) == 0
    assert frames.dropped == 1


def test_a_relay_that_is_away_costs_one_wait_only() -> None:
    published = FrameQueue(gather=0.004)
    line, frames = AppendQueue(published), buffer()
    frames.add(0, b"frame")
    line.add(("p", "a"), held_item("1", frames, 0, 0.05))
    assert line.take(0.0) is None
    line.take(0.05)
    assert published.away
    frames.add(1, b"frame")
    line.add(("p", "a"), held_item("2", frames, 1, 0.11))
    assert names(line.take(0.06)) == [("a", ["2"])], "nobody waits for a relay that is known to be away"


def test_all_held_lines_are_let_go_when_the_relay_turns_out_to_be_away() -> None:
    published = FrameQueue(gather=0.004)
    line, frames = AppendQueue(published), buffer()
    frames.add(0, b"frame")
    line.add(("p", "a"), held_item("1", frames, 0, 0.05))
    assert line.take(0.0) is None
    published.lost(AWAY, 0.01)
    assert names(line.take(0.01)) == [("a", ["1"])]


def test_what_was_withdrawn_is_not_sent() -> None:
    line = queue()
    first, second = Recorded("1"), Recorded("2")
    line.add(("p", "a"), first)
    line.add(("p", "a"), second)
    assert line.remove(("p", "a"), lambda item: item is second) == [second]
    assert names(line.take(0.0)) == [("a", ["1"])]
    assert line.remove(("p", "none"), lambda _: True) == []


def test_drained_items_come_back_in_order() -> None:
    line = queue()
    for name in ("1", "2"):
        line.add(("p", "a"), Recorded(name))
    line.take(0.0)
    line.add(("p", "a"), Recorded("3"))
    assert [item.name for item in line.drain() if isinstance(item, Recorded)] == ["1", "2", "3"]
    assert not line.pending


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.sampled_from("abc"), st.sampled_from(["plain", "atomic", "barrier", "again"])),
            st.tuples(st.just("take"), st.just(""), st.just("")),
            st.tuples(st.just("answer"), st.just(""), st.just("")),
            st.tuples(st.just("lose"), st.sampled_from(["away", "none", "internal"]), st.just("")),
        ),
        max_size=60,
    )
)
def test_every_session_keeps_its_order_through_any_course_of_things(steps: list[tuple[str, str, str]]) -> None:
    """The log, as a list per session: an event is in it once its request is answered. Events that are on their way when
    a stream breaks may or may not be stored; here they are, so that sending them again is seen."""
    line = queue()
    added: dict[str, list[str]] = {key: [] for key in "abc"}
    stored: dict[str, list[str]] = {key: [] for key in "abc"}
    items: list[Recorded] = []
    on_their_way: list[bytes] = []
    now = 0.0

    def store(request: bytes) -> None:
        for session, events in names(request):
            for name in events:
                if name not in stored[session]:
                    stored[session].append(name)

    def step(what: str, which: str, kind: str) -> None:
        nonlocal now
        now += 1.0
        if what == "add":
            item = Recorded(f"{len(items)}", atomic=kind == "atomic", barrier=kind in ("barrier", "again"))
            item.again = kind == "again"
            items.append(item)
            added[which].append(item.name)
            line.add(("p", which), item)
        elif what == "take":
            request = line.take(now)
            if request is not None:
                on_their_way.append(request)
        elif what == "answer" and on_their_way:
            request = on_their_way.pop(0)
            store(request)
            line.received(answer(request), now)
        elif what == "lose":
            for request in on_their_way:
                store(request)
            on_their_way.clear()
            line.lost({"away": AWAY, "internal": BROKEN}.get(which), now)

    for what, which, kind in steps:
        step(what, which, kind)
    for _ in range(10 * len(items) + 10):
        if not line.pending:
            break
        now += 10.0
        step("take", "", "")
        step("answer", "", "")
    assert not line.pending
    assert all(item.settled and item.failed is None for item in items)
    assert stored == added
