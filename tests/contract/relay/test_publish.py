"""Publish: what is taken, what is known already, who is fenced, and that a wrong batch harms nobody else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import grpc.aio
import pytest
import redis.asyncio

from hearth.relay.v1 import relay_pb2, relay_service_pb2, relay_service_pb2_grpc
from hearth.types.v1 import frame_pb2
from tests.contract.relay.conftest import Services
from tests.support import events
from tests.support.relay_reader import reading
from tests.support.relay_turns import publish, text_frame

ACCEPTED = relay_pb2.PUBLISH_OUTCOME_ACCEPTED
FENCED = relay_pb2.PUBLISH_OUTCOME_FENCED


async def test_the_answer_tells_how_far(services: Services) -> None:
    turn = services.turn()
    (nothing,) = await publish(services.relay, turn.batch())
    assert nothing.outcome == ACCEPTED
    assert not nothing.HasField("through")
    assert (await turn.publish(*turn.frames("m", "a", "b"))).through == 1
    turn.lose(5)
    assert (await turn.publish(*turn.frames("m", "c"))).through == 7
    assert nothing.execution.execution_id == turn.run.execution_id


async def test_an_identical_retry_is_taken_and_not_delivered_again(services: Services) -> None:
    turn = services.turn()
    await turn.start()
    async with reading(services.relay, turn.session) as reader:
        await reader.until_ready()
        first = turn.frames("m", "a", "b")
        await turn.publish(*first)
        assert (await turn.publish(*first)).through == 1
        assert (await turn.publish(*first, *turn.frames("m", "c"))).through == 2
        # An event that overtakes its frames may cost them.
        await reader.until_text("m", "abc")
        await turn.complete("m")
        await reader.until_type("message.completed")
        assert reader.text("m") == "abc"
        assert len(reader.frames) == 3


async def test_the_same_index_with_other_content_is_a_conflict(services: Services) -> None:
    turn = services.turn()
    await turn.publish(*turn.frames("m", *"abcdef"))
    (result,) = await publish(services.relay, turn.batch([text_frame(4, "m", "X"), text_frame(6, "m", "g")]))
    assert result.outcome == relay_pb2.PUBLISH_OUTCOME_CONFLICT
    assert result.through == 5
    assert "4" in result.problems[0].field
    assert (await turn.publish(*turn.frames("m", "g"))).through == 6


async def test_what_is_remembered_of_old_frames_ends(services: Services) -> None:
    turn = services.turn()
    await turn.publish(*turn.frames("m", *(str(number) for number in range(100))))
    for index, outcome in ((35, ACCEPTED), (36, relay_pb2.PUBLISH_OUTCOME_CONFLICT)):
        (result,) = await publish(services.relay, turn.batch([text_frame(index, "m", "X")]))
        assert (result.outcome, result.through) == (outcome, 99)


async def test_a_skipped_index_is_no_conflict_later(services: Services) -> None:
    turn = services.turn()
    await turn.publish(text_frame(0, "m", "a"), text_frame(3, "m", "b"))
    (late,) = await publish(services.relay, turn.batch([text_frame(2, "m", "late")]))
    assert (late.outcome, late.through) == (ACCEPTED, 3)


async def test_a_higher_epoch_replaces_and_a_lower_one_is_fenced(services: Services) -> None:
    old, new = services.turn(), None
    await old.say("m", "a")
    new = services.turn(old.session, epoch=2)
    assert (await new.publish(*new.frames("n", "b"))).through == 0
    (result,) = await publish(services.relay, old.batch(old.frames("m", "c")))
    assert result.outcome == FENCED
    assert (result.current.execution_id, result.current.epoch) == (new.run.execution_id, 2)
    rival = services.turn(old.session, epoch=2)
    (result,) = await publish(services.relay, rival.batch(rival.frames("m", "d")))
    assert (result.outcome, result.current.execution_id) == (FENCED, new.run.execution_id)


async def test_an_ended_execution_takes_no_more(services: Services) -> None:
    turn = services.turn()
    last = turn.frames("m", "a")
    (result,) = await publish(services.relay, turn.batch(last, ended=True))
    assert (result.outcome, result.through) == (ACCEPTED, 0)
    (result,) = await publish(services.relay, turn.batch(last, ended=True))
    assert (result.outcome, result.through) == (ACCEPTED, 0)
    (result,) = await publish(services.relay, turn.batch(turn.frames("m", "b")))
    assert result.outcome == FENCED


async def test_a_producer_whose_execution_history_knows_as_over_is_fenced(services: Services) -> None:
    turn = services.turn()
    await turn.start()
    await turn.append(turn.run.completed())
    (result,) = await publish(services.relay, turn.batch(turn.frames("m", "a")))
    assert (result.outcome, result.current.execution_id) == (FENCED, turn.run.execution_id)
    following = services.turn(turn.session, epoch=2)
    await following.say("n", "b")


async def test_wrong_batches_are_answered_and_harm_nobody(services: Services) -> None:
    turn = services.turn()
    bad_ids, bad_epoch = turn.batch(turn.frames("m", "a")), turn.batch()
    bad_ids.session.project, bad_ids.execution_id = "", "no-uuid"
    bad_epoch.epoch = 0
    turn.next = 0
    results = await publish(services.relay, bad_ids, turn.batch(turn.frames("m", "a")), bad_epoch)
    invalid = relay_pb2.PUBLISH_OUTCOME_INVALID
    assert [result.outcome for result in results] == [invalid, ACCEPTED, invalid]
    assert [problem.field for problem in results[0].problems] == [
        "batches[0].session.project",
        "batches[0].execution_id",
    ]
    assert [problem.field for problem in results[2].problems] == ["batches[2].epoch"]


async def test_an_id_as_long_as_a_message_is_answered(services: Services) -> None:
    turn = services.turn()
    wrong = turn.batch()
    wrong.execution_id = "x" * (4 * 1024 * 1024 - 100)
    (result,) = await publish(services.relay, wrong)
    assert result.outcome == relay_pb2.PUBLISH_OUTCOME_INVALID
    assert [problem.field for problem in result.problems] == ["batches[0].execution_id"]


async def test_a_frame_over_64_kib_is_too_large_and_the_service_goes_on(services: Services) -> None:
    turn = services.turn()
    await turn.start()
    large = frame_pb2.Frame(frame_index=1, entity_id="m", text_delta=frame_pb2.TextDelta(text="x" * 65 * 1024))
    frames = [*turn.frames("m", "a"), large, text_frame(2, "m", "c")]
    (result,) = await publish(services.relay, turn.batch(frames))
    assert (result.outcome, result.through) == (relay_pb2.PUBLISH_OUTCOME_TOO_LARGE, 0)
    assert result.problems[0].field == "batches[0].frames[1]"
    turn.next = 2
    async with reading(services.relay, turn.session) as reader:
        await reader.until_ready()
        await turn.say("m", "d")
        await reader.until_text("m", "ad")
        assert reader.gaps == [(1, 1)]


async def test_a_message_of_5_mib_is_refused_by_grpc(services: Services) -> None:
    turn = services.turn()
    frames = [text_frame(index, "m", "x" * 60_000) for index in range(88)]
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await publish(services.relay, turn.batch(frames))
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    await turn.say("m", "a")


async def test_requests_are_answered_in_order_on_one_stream(services: Services) -> None:
    turns = [services.turn() for _ in range(5)]
    stub = relay_service_pb2_grpc.RelayServiceStub(services.relay)

    async def requests() -> AsyncIterator[relay_service_pb2.PublishRequest]:
        for number in range(1, 101):
            batches = [turn.batch(turn.frames("m", str(number))) for turn in turns[: number % 6]]
            yield relay_service_pb2.PublishRequest(number=number, batches=batches)

    call = stub.Publish(requests())
    answers = [answer async for answer in call]
    assert [answer.number for answer in answers] == list(range(1, 101))
    assert all(result.outcome == ACCEPTED for answer in answers for result in answer.results)
    assert [len(answer.results) for answer in answers] == [number % 6 for number in range(1, 101)]


async def test_ten_thousand_frames_in_one_batch(services: Services) -> None:
    turn = services.turn()
    await turn.start()
    async with reading(services.relay, turn.session) as reader:
        await reader.until_ready()
        await turn.say("m", *(f"{number} " for number in range(10_000)))
        await turn.complete("m")
        await reader.until_type("message.completed")
        assert reader.text("m") == turn.texts["m"]
        assert reader.gaps == []


async def test_a_long_batch_is_taken_up_to_what_is_wrong_with_it(services: Services) -> None:
    turn = services.turn()
    await turn.publish(text_frame(2_500, "m", "known"))
    batch = turn.batch([text_frame(index, "m", str(index)) for index in range(4_000)], ended=True)
    (result,) = await publish(services.relay, batch)
    assert (result.outcome, result.through) == (relay_pb2.PUBLISH_OUTCOME_CONFLICT, 2_500)
    batch.frames[2_500].text_delta.text = "known"
    batch.frames[3_500].text_delta.text = "x" * 70_000
    (result,) = await publish(services.relay, batch)
    assert (result.outcome, result.through) == (relay_pb2.PUBLISH_OUTCOME_TOO_LARGE, 3_499)
    batch.frames[3_999].frame_index = 7
    (result,) = await publish(services.relay, batch)
    assert [problem.field for problem in result.problems] == ["batches[0].frames[3999].frame_index"]


async def test_every_key_ends_by_itself(services: Services, bus_url: str) -> None:
    open_turn, ended_turn = services.turn(), services.turn()
    for turn in (open_turn, ended_turn):
        await turn.start()
        await turn.say("m", "a", "b")
    await ended_turn.end()
    async with redis.asyncio.Redis.from_url(bus_url) as client:
        left = {key.decode(): await client.pttl(key) / 1000 async for key in client.scan_iter()}
    assert left
    assert all(seconds > 0 for seconds in left.values()), left
    of_open = [seconds for key, seconds in left.items() if open_turn.session.session in key]
    of_ended = [seconds for key, seconds in left.items() if ended_turn.session.session in key]
    assert len(of_open) == len(of_ended) == 2
    assert all(3 * 3600 - 60 < seconds <= 3 * 3600 for seconds in of_open)
    assert all(50 < seconds <= 60 for seconds in of_ended)


async def test_sessions_whose_names_run_together_are_kept_apart(services: Services) -> None:
    """("a:b", "c") and ("a", "b:c") have one channel on the bus."""
    unique = events.new_id()
    first = services.turn(events.key("c", f"{unique}:b"))
    second = services.turn(events.key("b:c", unique))
    async with reading(services.relay, first.session) as reader, reading(services.relay, second.session) as other:
        await reader.until_ready()
        await other.until_ready()
        await first.start()
        await first.say("m", "mine")
        await first.complete("m")
        await reader.until_type("message.completed")
        await second.start()
        await second.say("n", "other")
        await other.until_text("n", "other")
        await asyncio.sleep(0.1)
        assert [item.event.execution_id for item in other.events] == [second.run.execution_id]
        assert [item.event.execution_id for item in reader.events] == [first.run.execution_id] * 2
        assert reader.text("n") == other.text("m") == ""
    async with reading(services.relay, second.session) as late:
        await late.until_ready()
        assert (late.text("m"), late.text("n")) == ("", "other")
