"""L1: frames come before their event, after it none of them, and each reader is told what it lost."""

from __future__ import annotations

import asyncio

from hearth.relay.v1 import relay_pb2
from hearth.types.v1 import session_pb2
from tests.contract.relay.conftest import Services
from tests.support.relay_reader import StrictReader, reading
from tests.support.relay_turns import publish, text_frame


async def test_frames_wait_for_the_start_of_their_execution(services: Services) -> None:
    turn = services.turn()
    async with reading(services.relay, turn.session) as reader:
        await reader.until_ready()
        await turn.say("m", "before")
        async with reading(services.relay, turn.session) as late:
            await late.until_ready()
            assert reader.frames == late.frames == []
            await turn.start()
            await turn.say("m", " after")
            for each in (reader, late):
                await each.until_text("m", "before after")
                assert each.gaps == []


async def test_a_reader_that_comes_between_frames_and_start(services: Services) -> None:
    turn = services.turn()
    await turn.say("m", "before")
    async with reading(services.relay, turn.session) as reader:
        await reader.until_ready()
        await turn.start()
        await turn.complete("m")
        await reader.until_type("message.completed")
        assert reader.text("m") == "before"
        assert reader.gaps == []


async def test_a_lost_frame_is_told_before_what_comes_next(services: Services) -> None:
    turn = services.turn()
    async with reading(services.relay, turn.session) as reader:
        await reader.until_ready()
        await turn.start()
        await turn.say("m", "a")
        turn.lose(2)
        await turn.say("m", "b")
        turn.lose(3)
        await turn.complete("m")
        await reader.until_type("message.completed")
        assert reader.gaps == [(1, 2), (4, 6)]


async def test_a_frame_that_comes_after_its_event_is_left_out(services: Services) -> None:
    turn = services.turn()
    async with reading(services.relay, turn.session) as reader:
        await reader.until_ready()
        await turn.start()
        late = turn.frames("m", "late")
        await turn.complete("m")
        await reader.until_type("message.completed")
        await turn.publish(*late)
        await turn.say("n", "next")
        await reader.until_text("n", "next")
        assert reader.gaps == [(0, 0)]
        assert reader.text("m") == ""


async def test_frames_that_come_after_their_event_reach_nobody_who_joined_between(services: Services) -> None:
    turn = services.turn()
    await turn.start()
    late = turn.frames("m", "late", " frames")
    sequence = await turn.complete("m")
    async with (
        reading(services.relay, turn.session) as whole,
        reading(services.relay, turn.session, tail=True) as tail,
        reading(services.other_relay, turn.session, after=session_pb2.Cursor(sequence=sequence)) as resumed,
    ):
        readers = (whole, tail, resumed)
        for reader in readers:
            await reader.until_ready()
        await turn.publish(*late)
        await turn.say("n", "next")
        for reader in readers:
            await reader.until_text("n", "next")
            assert reader.text("m") == ""


async def test_nothing_comes_after_an_ending(services: Services) -> None:
    turn = services.turn()
    async with reading(services.relay, turn.session) as reader:
        await reader.until_ready()
        await turn.start()
        await turn.say("m", "a")
        await turn.append(turn.covering(turn.run.completed(counted=0)))
        # What the relay hands out before it hears of the ending comes before the ending, and may.
        await reader.until_type("execution.completed")
        await turn.say("m", "b")
        following = services.turn(turn.session, epoch=2)
        await following.start()
        await following.say("n", "next")
        await reader.until_text("n", "next")
        assert reader.text("m") == "a"


async def test_a_late_joiner_sees_all_of_an_unfinished_message(services: Services) -> None:
    turn = services.turn()
    await turn.start()
    await turn.say("done", "this", " is", " complete")
    await turn.complete("done")
    await turn.say("m", *(f"{number} " for number in range(200)))

    async def check(late: StrictReader) -> None:
        await late.until_ready()
        assert late.text("m") == turn.texts["m"]
        assert late.text("done") == ""
        assert late.gaps == []
        assert len(late.frames) == 1
        assert late.frames[0].frame.merged_through == turn.through

    async with reading(services.relay, turn.session) as late, reading(services.relay, turn.session, tail=True) as tail:
        await check(late)
        await check(tail)
        await turn.say("m", "and", " more")
        sequence = await turn.complete("m")
        for each in (late, tail):
            await each.until_sequence(sequence)
            assert each.text("m") == turn.texts["m"]
            assert each.gaps == []


async def test_frames_of_an_open_tool_come_before_the_events_that_cover_them(services: Services) -> None:
    """The strict reader refuses a frame at or below the frames_through of an event that came before it."""
    turn = services.turn()
    await turn.start()
    await turn.begin_tool("t1")
    await turn.begin_tool("t2")
    first = await turn.complete_tool("t1")
    await turn.say("m", "waiting", " for", " the", " other")
    async with reading(services.relay, turn.session) as late:
        await late.until_ready()
        assert [item.frame.entity_id for item in late.frames] == ["t2", "m"]
        assert late.kinds() == ["event", "frame", "event", "frame", "ready"]
        cursor = next(item.cursor for item in late.events if item.cursor.sequence == first)
    async with reading(services.relay, turn.session, after=cursor) as resumed:
        await resumed.until_ready()
        assert [item.frame.entity_id for item in resumed.frames] == ["t2", "m"]
        assert late.gaps == resumed.gaps == []


async def test_late_joiners_at_every_moment_of_an_answer(services: Services) -> None:
    turn = services.turn()
    await turn.start()
    readers: list[StrictReader] = []
    async with asyncio.TaskGroup() as group:

        async def join() -> None:
            async with reading(services.relay, turn.session) as reader:
                readers.append(reader)
                await reader.until_type("execution.completed")
                assert reader.gaps == []

        for message in range(4):
            for word in range(12):
                await turn.say(f"m{message}", f"{word} ", "x ")
                if word % 3 == 0:
                    group.create_task(join())
                    await asyncio.sleep(0)
            await turn.complete(f"m{message}")
        await turn.end()
    assert len(readers) == 16


async def test_a_higher_epoch_resets_only_who_holds_frames(services: Services) -> None:
    turn = services.turn()
    async with reading(services.relay, turn.session) as holder:
        await holder.until_ready()
        await turn.start()
        async with reading(services.relay, turn.session, events_only=True) as other:
            await other.until_ready()
            await turn.say("m", "old", " text")
            await holder.until_text("m", "old text")
            again = turn.again(2)
            await again.say("m", "new")
            (fenced,) = await publish(services.relay, turn.batch(turn.frames("m", "stale")))
            assert fenced.outcome == relay_pb2.PUBLISH_OUTCOME_FENCED
            assert (fenced.current.execution_id, fenced.current.epoch) == (turn.run.execution_id, 2)
            await again.complete("m")
            for each in (holder, other):
                await each.until_type("message.completed")
            assert [(item.reset.execution_id, item.reset.epoch) for item in holder.of_kind("reset")] == [
                (turn.run.execution_id, 2)
            ]
            assert holder.gaps == []
        async with reading(services.relay, turn.session) as late:
            await late.until_ready()
            assert late.of_kind("reset") == []


async def test_frames_that_the_buffer_lost_are_told(services: Services) -> None:
    turn = services.turn()
    await turn.start()
    text = "x" * 30_000
    # More than 4 MiB: the oldest do not fit.
    for _ in range(20):
        await turn.say("m", *[text] * 10)
    async with reading(services.relay, turn.session) as late:
        await late.until_ready()
        ((first, last),) = late.gaps
        assert first == 0
        assert late.frames[0].frame.frame_index == last + 1
        assert 4 * 1024 * 1024 * 0.9 < len(late.text("m")) <= 4 * 1024 * 1024


async def test_a_reader_that_resumes_mid_message_gets_it_from_its_first_frame(services: Services) -> None:
    turn = services.turn()
    async with reading(services.relay, turn.session) as reader:
        await reader.until_ready()
        await turn.start()
        await turn.say("m", "first", " half")
        await reader.until_text("m", "first half")
        await reader.disconnect()
        await turn.say("m", ", second", " half")
        reader.connect()
        await reader.until_ready()
        resumed = [item.frame.frame for item in reader.recording[-1].items if item.HasField("frame")]
        assert "".join(frame.text_delta.text for frame in resumed) == "first half, second half"
        await turn.say("m", "!")
        await turn.complete("m")
        await reader.until_type("message.completed")
        assert reader.gaps == []


async def test_interleaved_sessions_do_not_mix(services: Services) -> None:
    turns = [services.turn() for _ in range(8)]
    for turn in turns:
        await turn.start()
    batches = [turn.batch(turn.frames("m", f"text of {number}")) for number, turn in enumerate(turns)]
    results = await publish(services.relay, *batches)
    assert [result.execution.execution_id for result in results] == [turn.run.execution_id for turn in turns]
    for number, turn in enumerate(turns):
        async with reading(services.relay, turn.session) as reader:
            await reader.until_ready()
            assert reader.text("m") == f"text of {number}"


async def test_a_frame_of_an_unknown_kind_is_delivered(services: Services) -> None:
    turn = services.turn()
    await turn.start()
    frame = text_frame(turn.next, "m", "")
    frame.ClearField("body")
    # A field number that this version does not know.
    frame.MergeFromString(b"\xfa\x7f\x05hello")
    async with reading(services.relay, turn.session) as reader:
        await reader.until_ready()
        await turn.publish(frame)
        await reader.until(lambda: reader.frames)
        assert reader.frames[0].frame.SerializeToString() == frame.SerializeToString()
