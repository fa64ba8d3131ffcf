"""The line of frames to the relay: small batches, bounds that drop the oldest, and what each answer leads to."""

from __future__ import annotations

import grpc
import pytest

from hearth._pipeline import ProtocolViolation
from hearth._publishing import ENDED_WAITING, FrameBuffer, FrameQueue
from hearth.errors import CallError
from hearth.relay.v1 import relay_pb2, relay_service_pb2
from hearth.types.v1 import frame_pb2, session_pb2

AWAY = CallError(grpc.StatusCode.UNAVAILABLE, "away")
GATHER = 0.004


class Fences:
    def __init__(self) -> None:
        self.seen: list[session_pb2.ExecutionRef] = []


def buffer(name: str = "a", *, limit: int = 256, fences: Fences | None = None) -> FrameBuffer:
    session = session_pb2.SessionKey(project="p", session=name)
    execution = session_pb2.ExecutionRef(execution_id=f"x-{name}", epoch=3)
    return FrameBuffer(session, execution, limit=limit, fenced=(fences or Fences()).seen.append)


def add(line: FrameQueue, frames: FrameBuffer, *indexes: int) -> None:
    for index in indexes:
        frames.add(index, frame_pb2.Frame(frame_index=index, entity_id="m").SerializeToString())
        line.add(frames)


def sent(request: bytes | None) -> relay_service_pb2.PublishRequest:
    assert request is not None
    return relay_service_pb2.PublishRequest.FromString(request)


def indexes(request: bytes | None) -> dict[str, list[int]]:
    return {batch.session.session: [frame.frame_index for frame in batch.frames] for batch in sent(request).batches}


def answer(
    request: bytes | None,
    outcome: relay_pb2.PublishOutcome.ValueType = relay_pb2.PUBLISH_OUTCOME_ACCEPTED,
    *,
    through: int | None = None,
) -> relay_service_pb2.PublishResponse:
    found = sent(request)
    response = relay_service_pb2.PublishResponse(number=found.number)
    for batch in found.batches:
        last = through if through is not None else (batch.frames[-1].frame_index if batch.frames else None)
        current = session_pb2.ExecutionRef(execution_id="other", epoch=4)
        response.results.add(outcome=outcome, through=last, current=current)
    return response


def test_a_batch_names_its_execution() -> None:
    line, frames = FrameQueue(gather=GATHER), buffer()
    add(line, frames, 0)
    [batch] = sent(line.take(0.0)).batches
    assert (batch.session.project, batch.session.session, batch.execution_id, batch.epoch) == ("p", "a", "x-a", 3)
    assert not batch.ended


def test_the_first_frame_goes_at_once_and_the_next_ones_gather() -> None:
    line, one, two = FrameQueue(gather=GATHER), buffer("a"), buffer("b")
    add(line, one, 0)
    assert indexes(line.take(0.0)) == {"a": [0]}
    add(line, one, 1, 2)
    add(line, two, 0)
    assert line.take(0.001) is None
    assert line.next_time(0.001) == GATHER
    assert indexes(line.take(GATHER)) == {"a": [1, 2], "b": [0]}


def test_an_event_that_waits_hurries_its_frames() -> None:
    line, frames = FrameQueue(gather=GATHER), buffer()
    add(line, frames, 0)
    line.take(0.0)
    add(line, frames, 1)
    line.hurry()
    assert indexes(line.take(0.0)) == {"a": [1]}


def test_two_requests_are_on_their_way_at_most() -> None:
    line, frames = FrameQueue(gather=GATHER), buffer()
    requests = []
    for index in range(3):
        add(line, frames, index)
        requests.append(line.take(float(index)))
    assert requests[2] is None
    assert line.next_time(3.0) is None
    line.received(answer(requests[0]), 3.0)
    assert indexes(line.take(3.0)) == {"a": [2]}


def test_only_the_first_frame_in_line_asks_for_a_wake_up() -> None:
    line, one, two = FrameQueue(gather=GATHER), buffer("a"), buffer("b")
    one.add(0, b"")
    two.add(0, b"")
    assert [line.add(one), line.add(one), line.add(two)] == [True, False, False]


def test_an_acknowledgement_frees_what_it_covers() -> None:
    line, frames = FrameQueue(gather=GATHER), buffer()
    add(line, frames, 0, 1, 2)
    request = line.take(0.0)
    assert frames.holds(0)
    line.received(answer(request, through=1), 0.0)
    assert not frames.holds(1)
    assert frames.holds(2)


def test_too_many_frames_drop_the_oldest() -> None:
    line, frames = FrameQueue(gather=GATHER), buffer(limit=4)
    add(line, frames, *range(6))
    assert indexes(line.take(0.0)) == {"a": [2, 3, 4, 5]}
    assert frames.dropped == 2
    add(line, frames, 6)
    assert len(frames) == 4, "what was sent and not acknowledged counts too"


def test_after_a_loss_everything_held_goes_again_in_order() -> None:
    line, frames = FrameQueue(gather=GATHER), buffer()
    add(line, frames, 0, 1)
    line.take(0.0)
    add(line, frames, 2)
    line.take(1.0)
    line.lost(AWAY, 2.0)
    was_away = line.away
    again = line.take(2.0)
    assert indexes(again) == {"a": [0, 1, 2]}
    assert sent(again).number == 1
    line.received(answer(again), 2.0)
    assert (was_away, line.away, line.pending) == (True, False, False)


def test_a_stream_that_ends_well_says_nothing_about_the_relay() -> None:
    line, frames = FrameQueue(gather=GATHER), buffer()
    add(line, frames, 0)
    line.take(0.0)
    line.lost(None, 0.0)
    assert not line.away
    assert indexes(line.take(0.0)) == {"a": [0]}


def test_frames_that_break_their_call_are_given_up() -> None:
    line, frames = FrameQueue(gather=GATHER), buffer()
    add(line, frames, 0)
    line.take(0.0)
    add(line, frames, 1)
    line.lost(CallError(grpc.StatusCode.INVALID_ARGUMENT, "no"), 0.0)
    assert indexes(line.take(1.0)) == {"a": [1]}
    assert frames.dropped == 1


def test_frames_whose_call_ended_for_a_reason_that_grpc_lost_go_again() -> None:
    line, frames = FrameQueue(gather=GATHER), buffer()
    add(line, frames, 0)
    frames.ended = True
    line.take(0.0)
    line.lost(CallError(grpc.StatusCode.INTERNAL, "Internal error from Core"), 0.0)
    again = line.take(0.0)
    assert (indexes(again), sent(again).batches[0].ended) == ({"a": [0]}, True)
    assert frames.dropped == 0
    line.lost(CallError(grpc.StatusCode.INTERNAL, "an error in the relay"), 0.0)
    assert frames.dropped == 1


def test_a_bus_that_is_away_is_tried_again_less_and_less_often() -> None:
    line, frames = FrameQueue(gather=GATHER), buffer()
    add(line, frames, 0)
    now, waits = 0.0, []
    for _ in range(8):
        request = line.take(now)
        assert indexes(request) == {"a": [0]}
        line.received(answer(request, relay_pb2.PUBLISH_OUTCOME_UNAVAILABLE), now)
        assert line.take(now) is None
        wait = line.next_time(now)
        assert wait is not None
        waits.append(wait - now)
        now = wait
    assert waits == sorted(waits)
    assert waits[0] < 0.2
    assert waits[-1] <= 2.001
    line.received(answer(line.take(now)), now)
    assert not line.away
    assert not line.pending


def test_a_fenced_writer_is_told_and_its_frames_are_gone() -> None:
    fences = Fences()
    line, frames = FrameQueue(gather=GATHER), buffer(fences=fences)
    add(line, frames, 0)
    request = line.take(0.0)
    add(line, frames, 1)
    line.received(answer(request, relay_pb2.PUBLISH_OUTCOME_FENCED), 0.0)
    assert [(found.execution_id, found.epoch) for found in fences.seen] == [("other", 4)]
    assert len(frames) == 0
    assert line.take(1.0) is None


@pytest.mark.parametrize(
    "outcome",
    [
        relay_pb2.PUBLISH_OUTCOME_CONFLICT,
        relay_pb2.PUBLISH_OUTCOME_TOO_LARGE,
        relay_pb2.PUBLISH_OUTCOME_INVALID,
        relay_pb2.PUBLISH_OUTCOME_UNSPECIFIED,
    ],
)
def test_refused_frames_are_given_up_and_the_next_ones_go(outcome: relay_pb2.PublishOutcome.ValueType) -> None:
    line, frames = FrameQueue(gather=GATHER), buffer()
    add(line, frames, 0, 1)
    request = line.take(0.0)
    add(line, frames, 2)
    line.received(answer(request, outcome), 0.0)
    assert indexes(line.take(1.0)) == {"a": [2]}


def test_the_last_word_goes_with_the_last_frames_and_again_after_a_loss() -> None:
    line, frames = FrameQueue(gather=GATHER), buffer()
    add(line, frames, 0)
    frames.ended = True
    assert sent(line.take(0.0)).batches[0].ended
    line.lost(AWAY, 0.0)
    again = line.take(0.0)
    assert (indexes(again), sent(again).batches[0].ended) == ({"a": [0]}, True)
    line.received(answer(again), 0.0)
    assert not line.pending


def test_last_words_do_not_pile_up_while_the_relay_is_away() -> None:
    line = FrameQueue(gather=GATHER)
    for _ in range(ENDED_WAITING + 10):
        frames = buffer()
        frames.ended = True
        line.add(frames)
    request = line.take(0.0)
    assert len(sent(request).batches) == ENDED_WAITING


def test_one_request_stays_small() -> None:
    line = FrameQueue(gather=GATHER)
    many = [buffer(f"s{number}") for number in range(3)]
    for frames in many:
        for index in range(10):
            frames.add(index, b"x" * 60_000)
        line.add(frames)
    requests = [line.take(0.0), line.take(1.0)]
    assert all(len(request or b"") < 1_200_000 for request in requests)
    total = sum(len(batch.frames) for request in requests for batch in sent(request).batches)
    assert total == 30


@pytest.mark.parametrize("wrong", ["number", "count"])
def test_an_answer_that_does_not_fit_is_not_trusted(wrong: str) -> None:
    line, frames = FrameQueue(gather=GATHER), buffer()
    add(line, frames, 0)
    reply = answer(line.take(0.0))
    if wrong == "number":
        reply.number = 9
    else:
        reply.results.add()
    with pytest.raises(ProtocolViolation):
        line.received(reply, 0.0)
