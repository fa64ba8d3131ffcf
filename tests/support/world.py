"""A small world of sessions on real services: producers that obey and some that do not, and readers of all kinds.

Whoever plays calls the steps in any order; each returns at once, and what it began goes on meanwhile. `settle` waits
until nothing moves any more and gives the recording of everything. Numbers of sessions, turns, readers and replicas are
taken modulo how many there are, so that any number means something.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from typing import TypeVar

import grpc
import grpc.aio

from hearth.errors import CallError
from hearth.history.v1 import history_pb2
from hearth.producer import Producer
from hearth.types.v1 import event_pb2, session_pb2
from services.chassis.clock import SystemClock
from tests.support import events
from tests.support.history_client import Client
from tests.support.recorder import RawHistory, RawRelay, Recorder
from tests.support.recording import ENDINGS, Append, Key, Log, Recording, runner
from tests.support.relay_reader import StrictReader
from tests.support.relay_turns import text_frame
from tests.support.targets import Target
from tests.support.world_people import Conversation, Follower, Turn

# What settling may take, all in all. Far above what it takes, so that a run that hangs is told as such.
SETTLE_SECONDS = 120.0
_PRODUCERS = 2
_PAUSE_SECONDS = 0.05
# Turns that a step may still mean: the newest ones, superseded or not.
_RECENT = 6

_T = TypeVar("_T")


class World:
    """Use it with `async with`, in one event loop."""

    def __init__(self, target: Target) -> None:
        self.recorder = Recorder()
        self.conversations: list[Conversation] = []
        self.turns: list[Turn] = []
        self.followers: list[Follower] = []
        # The ending whose answer speaks for an event that gets none of its own, by its id.
        self.answered_with: dict[str, Append] = {}
        # What was done, for whoever has to understand a failure.
        self.story: list[str] = []
        self._target = target
        self._stack = AsyncExitStack()
        self._producers: list[Producer] = []
        self._tasks: set[asyncio.Task[object]] = set()
        self._promises: list[asyncio.Future[object]] = []
        self._names = itertools.count(1)
        self._begun_at = time.monotonic()

    async def __aenter__(self) -> World:
        self._history_channels = [await self._channel(address) for address in self._target.history]
        self._relay_channels = [await self._channel(address) for address in self._target.relay]
        self._histories = [RawHistory(channel, self.recorder) for channel in self._history_channels]
        self._relays = [RawRelay(channel, self.recorder) for channel in self._relay_channels]
        for number in range(_PRODUCERS):
            producer = Producer(
                history=await self._channel(_all_of(self._target.history, number)),
                relay=await self._channel(_all_of(self._target.relay, number)),
                clock=SystemClock(),
            )
            await producer.start()
            self._producers.append(producer)
        return self

    async def __aexit__(self, *_: object) -> None:
        for follower in self.followers:
            await follower.leave()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for producer in self._producers:
            await producer.close(0.5)
        await self._stack.aclose()

    @property
    def recording(self) -> Recording:
        """What happened so far."""
        return self.recorder.recording

    def tell(self, text: str) -> None:
        """Add to the story."""
        self.story.append(f"{time.monotonic() - self._begun_at:8.3f} {text}")

    # --- producers that obey ---

    async def open_conversation(self) -> None:
        """A session of its own."""
        self.conversations.append(Conversation(events.key()))
        self.tell(f"session {len(self.conversations) - 1}")

    async def begin(self, session: int, producer: int) -> None:
        """A new execution; one that still runs is taken over first."""
        conversation = self._conversation(session)
        if conversation.current is not None:
            await self.take_over(session, producer)
        await self._drive(conversation, events.new_id(), producer)
        turn = self.turns[-1]
        turn.append(event_pb2.Event(execution_started=event_pb2.ExecutionStarted(agent="scripted")))

    async def again(self, session: int, producer: int) -> None:
        """The execution that runs is driven again, at a higher epoch; its first writer does not know."""
        conversation = self._conversation(session)
        if conversation.current is not None:
            await self._drive(conversation, conversation.current.execution.execution_id, producer)

    async def take_over(self, session: int, producer: int) -> None:
        """Somebody ends the execution that runs, at a higher epoch; its writer does not know."""
        conversation = self._conversation(session)
        turn, conversation.current = conversation.current, None
        if turn is not None:
            epoch = conversation.next_epoch()
            self._append_fact(conversation, producer, events.Run(epoch, turn.execution.execution_id).lost())
            self.tell(f"{turn} is taken over at epoch {epoch}")

    async def say(self, turn: int, pieces: int) -> None:
        """Frames of the message that is being written."""
        (await self._writing(turn)).say(pieces)

    async def complete(self, turn: int) -> None:
        """The message that was being written, as an event."""
        (await self._writing(turn)).complete()

    async def use_tools(self, turn: int, count: int) -> None:
        """Tool calls, begun in frames and told in one atomic set."""
        (await self._writing(turn)).use_tools(count)

    async def end(self, turn: int, *, with_last: bool) -> None:
        """The ending, maybe with a last tool call in one atomic set."""
        found = await self._writing(turn)
        found.end(with_last=with_last)
        if found.conversation.current is found:
            found.conversation.current = None

    async def state_fact(self, session: int, producer: int) -> None:
        """An event of the session."""
        conversation = self._conversation(session)
        self._append_fact(conversation, producer, events.input_queued())

    # --- producers that do not ---

    async def resend(self, which: int, replica: int, *, altered: bool) -> None:
        """An event that somebody sent already, or something else under its id."""

        async def act() -> None:
            # The id of what was removed is forgotten, so nobody may send it again. Chosen here and now: from this
            # moment on it is on its way, and is not removed.
            forgotten = {item.event.event_id.lower() for each in self.conversations for item in each.gone.values()}
            appends = [found for found in self.recording.appends if found.event.event_id.lower() not in forgotten]
            if not appends:
                return
            append = appends[-1 - which % len(appends)]
            event = event_pb2.Event()
            event.CopyFrom(append.event)
            if altered:
                event.entity_id = f"{event.entity_id[:200]}x"
            self.tell(f"{event.event_id} again")
            malformed = () if append.sound else (0,)
            await self._history(replica).append(append.session, event, malformed=malformed)

        self._start("resend", act())

    async def end_wrongly(self, turn: int, replica: int, extra: int) -> None:
        """An ending by somebody else at the epoch of the writer: it counts too much, or with 0 it is accepted."""
        found = self._turn(turn)
        if found is not None:
            run = events.Run(found.execution.epoch, found.execution.execution_id)
            ending = run.completed(counted=found.counted + extra, incomplete="" if extra else "not its writer")
            self._start(f"{found} ends wrongly", self._history(replica).append(found.key, ending))

    async def intrude(self, session: int, replica: int, below: int) -> None:
        """A runner that has no right to: another execution at the newest epoch, or below it."""
        conversation = self._conversation(session)
        run = events.Run(max(1, conversation.epoch - below))
        execution = session_pb2.ExecutionRef(execution_id=run.execution_id, epoch=run.epoch)
        frame = text_frame(0, "intruder", "I am in")
        self.tell(f"an intruder in {session} at epoch {run.epoch}")

        async def act() -> None:
            await self._history(replica).append(conversation.key, run.started(), run.message(), run.completed())
            await self._relay(replica).publish(conversation.key, execution, frame)

        self._start("intrude", act())

    async def output_of_the_past(self, replica: int) -> None:
        """Output of a writer that was superseded, past its producer."""
        found = next((each for each in reversed(self.turns) if each is not each.conversation.current), None)
        if found is not None:
            run = events.Run(found.execution.epoch, found.execution.execution_id)
            self._start(f"{found} from the past", self._history(replica).append(found.key, run.message(), run.tool()))
            await self._repeat_frames(found, replica)

    async def repeat_frames(self, turn: int, replica: int) -> None:
        """Frames that were published already."""
        found = self._turn(turn)
        if found is not None:
            await self._repeat_frames(found, replica)

    async def _repeat_frames(self, turn: Turn, replica: int) -> None:
        if turn.frames:
            newest = turn.frames[-3:]
            self._start(f"{turn} repeats frames", self._relay(replica).publish(turn.key, turn.execution, *newest))

    async def send_malformed(self, session: int, replica: int) -> None:
        """A malformed event between sound ones, in one request."""
        conversation = self._conversation(session)
        bad = events.user_message()
        bad.type = "nothing"
        sent = [events.user_message("before"), bad, events.user_message("behind")]
        self._start("malformed", self._history(replica).append(conversation.key, *sent, malformed=(1,)))

    # --- operators ---

    async def mark_incomplete(self, turn: int, replica: int) -> None:
        """Somebody says that an execution lacks output."""
        found = self._turn(turn)
        if found is not None:
            reason = f"mark {next(self._names)}"
            marking = self._history(replica).mark(found.key, found.execution.execution_id, reason)
            self._start(f"{found}: {reason}", marking)

    async def trim(self, session: int, replica: int, share: int) -> None:
        """Old events are removed: a share (of 10) of what is settled in a session."""
        conversation = self._conversation(session)

        async def act() -> None:
            client = Client(self._history_channels[replica % len(self._history_channels)])
            try:
                items = await self._kept(client, conversation)
            except grpc.aio.AioRpcError as error:
                if error.code() not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OUT_OF_RANGE):
                    raise
                return
            settled = self._settled(conversation, items)
            going = settled[: len(settled) * (1 + share % 10) // 10]
            if going:
                conversation.gone.update((item.cursor.sequence, item) for item in going)
                through = going[-1].cursor.sequence
                self.tell(f"session {session % len(self.conversations)} is trimmed through {through}")
                await self._history(replica).trim(conversation.key, through)

        self._start("trim", act())

    def _settled(self, conversation: Conversation, items: list[event_pb2.EventItem]) -> list[event_pb2.EventItem]:
        """The first of `items` that nobody may send again: everybody has an answer, and their executions are over."""
        open_ids = {
            _id(append)
            for append in self.recording.appends
            if append.session == conversation.key and self.answered_with.get(_id(append), append).result is None
        }
        ended = {item.event.execution_id for item in items if item.event.type in ENDINGS}
        settled = []
        for item in items:
            event = item.event
            if event.event_id.lower() in open_ids or (runner(event) and event.execution_id not in ended):
                break
            settled.append(item)
        return settled

    # --- readers ---

    async def join(self, session: int, replica: int, *, start: int, events_only: bool) -> None:
        """A reader from the first event (0), from the tail (1), or from somewhere that a reader has been (above)."""
        conversation = self._conversation(session)
        cursors = [session_pb2.Cursor(), None, *self._edges(conversation)]
        after = cursors[start % len(cursors)]
        reader = StrictReader(
            self._relay_channels[replica % len(self._relay_channels)],
            conversation.session,
            after=after,
            tail=after is None,
            events_only=events_only,
        )
        follower = Follower(conversation, reader, self._relay_channels, replica, self.recorder.tick)
        self.recording.readers.append(follower.record)
        self.followers.append(follower)
        follower.come()
        self.tell(f"reader {len(self.followers) - 1} of {session} at relay {replica} from {after}".replace("\n", " "))

    async def leave(self, reader: int) -> None:
        """A reader goes away, whatever it was doing."""
        if self.followers:
            await self.followers[reader % len(self.followers)].leave()

    async def come_back(self, reader: int) -> None:
        """A reader that left comes back with its cursor, at another relay."""
        if self.followers:
            self.followers[reader % len(self.followers)].come()

    async def stall(self, reader: int) -> None:
        """A reader takes nothing more."""
        if self.followers:
            self.followers[reader % len(self.followers)].reader.pause()

    async def go_on(self, reader: int) -> None:
        """And takes again."""
        if self.followers:
            self.followers[reader % len(self.followers)].reader.go_on()

    async def read(self, session: int, replica: int, start: int, size: int) -> None:
        """One page of a log, or with size 0 all of it, from the start or from where a reader has been."""
        conversation = self._conversation(session)
        cursors = [session_pb2.Cursor(), *self._cursors(conversation.key)]
        after = cursors[start % len(cursors)]
        history = self._history(replica)
        reading = history.page(conversation.key, after, size) if size else history.stream(conversation.key, after)
        self._start("read", reading)

    # --- the end ---

    async def settle(self) -> Recording:
        """Wait until everything is answered and read; end what still runs; see that frames flow; read the logs."""
        self.tell("settling")
        async with asyncio.timeout(SETTLE_SECONDS):
            await self._everything_answered()
            for conversation in self.conversations:
                await self._end_all(conversation)
            for follower in self.followers:
                follower.reader.go_on()
                follower.come()
            for number in range(len(self.conversations)):
                await self._speak_and_be_heard(number)
            await self._mark_again()
            for conversation in self.conversations:
                log = self.recording.logs[conversation.key] = await self._log(conversation)
                for follower in self.followers:
                    if follower.conversation is conversation:
                        await follower.catches_up(log.last)
        self.recording.settled = True
        self.tell("settled")
        return self.recording

    async def _everything_answered(self) -> None:
        waiting = [*self._promises, *self._tasks]
        for answer in await asyncio.gather(*waiting, return_exceptions=True):
            # A writer that was refused, or an event that its producer gave up, has no answer.
            if isinstance(answer, BaseException) and not isinstance(answer, CallError):
                raise answer

    async def _end_all(self, conversation: Conversation) -> None:
        """As a sweep does: end every execution that has no ending."""
        conversation.current = None
        begun: dict[str, bool] = {}
        for item in (await self._log(conversation)).items:
            if runner(item.event):
                ended = begun.get(item.event.execution_id, False)
                begun[item.event.execution_id] = ended or item.event.type in ENDINGS
        for execution_id, ended in begun.items():
            if not ended:
                lost = events.Run(conversation.next_epoch(), execution_id).lost()
                await self._until_answered(conversation.key, lost)

    async def _mark_again(self) -> None:
        """Every execution that was marked, once more: the answer shows what became of the first mark."""
        marked = {(mark.session, mark.execution_id) for mark in self.recording.marks}
        for key, execution_id in sorted(marked):
            for replica in itertools.count():
                if await self._history(replica).mark(key, execution_id, "marked again"):
                    break
                await asyncio.sleep(_PAUSE_SECONDS)

    async def _until_answered(self, key: Key, event: event_pb2.Event) -> history_pb2.AppendResult:
        for replica in itertools.count():
            results = await self._history(replica).append(key, event)
            if results is not None:
                return results[0]
            await asyncio.sleep(_PAUSE_SECONDS)
        raise AssertionError

    async def _speak_and_be_heard(self, session: int) -> None:
        """A turn of which a new reader gets every frame: what was away is back by itself."""
        conversation = self._conversation(session)
        for attempt in itertools.count():
            relay = self._relay_channels[attempt % len(self._relay_channels)]
            reader = StrictReader(relay, conversation.session, tail=True)
            follower = Follower(conversation, reader, self._relay_channels, attempt, self.recorder.tick)
            follower.come()
            await follower.is_ready()
            await self.begin(session, session + 1 + attempt)
            turn = self.turns[-1]
            turn.say(3)
            turn.complete()
            turn.end(with_last=False)
            conversation.current = None
            await asyncio.gather(*self._promises[-3:], return_exceptions=True)
            ending = self.recording.appends[-1].result
            if ending is not None and ending.sequence:
                await follower.gets(turn.execution.execution_id)
            await follower.leave()
            self.recording.readers.append(follower.record)
            mine = turn.execution.execution_id
            # What is told late of the turn before is no news of this one.
            lost = any(item.gap.execution_id == mine for item in reader.of_kind("gap"))
            if not lost and any(frame.execution_id == mine for frame in reader.frames):
                return
            # An intruder had the epoch, or the frames of that moment were lost; it must not stay so.
            self.tell(f"session {session} was not heard: {reader.kinds()}")
            await self._end_all(conversation)

    async def _log(self, conversation: Conversation) -> Log:
        """The log as every replica tells it, which must be the same."""
        logs: list[Log] = []
        for channel in self._history_channels:
            client = Client(channel)
            items = await self._patient(lambda client=client: self._kept(client, conversation))  # type: ignore[misc]
            aside = await self._patient(lambda client=client: client.quarantined(conversation.session))  # type: ignore[misc]
            (head,) = await self._patient(lambda client=client: client.heads(conversation.session))  # type: ignore[misc]
            first = head.oldest or head.head.sequence + 1
            before = [conversation.gone[sequence] for sequence in range(1, first)]
            logs.append(Log([*before, *items], aside, head, kept_from=first))
        assert all(log == logs[0] for log in logs), "replicas tell different logs"
        return logs[0]

    async def _kept(self, client: Client, conversation: Conversation) -> list[event_pb2.EventItem]:
        """What is kept of a log."""
        (head,) = await client.heads(conversation.session)
        oldest = head.oldest or head.head.sequence + 1
        before = conversation.gone.get(oldest - 1)
        return await client.read(conversation.session, after=before.cursor if before is not None else None)

    async def _patient(self, call: Callable[[], Coroutine[object, object, _T]]) -> _T:
        while True:
            try:
                return await call()
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
            await asyncio.sleep(_PAUSE_SECONDS)

    # --- within ---

    def promise(self, append: Append, future: asyncio.Future[history_pb2.AppendResult]) -> None:
        """Write the answer down when it comes."""

        def answered(done: asyncio.Future[history_pb2.AppendResult]) -> None:
            if not done.cancelled() and done.exception() is None:
                self.recorder.answered(append, done.result())

        future.add_done_callback(answered)
        self._promises.append(future)  # type: ignore[arg-type]

    def promise_all(self, appends: list[Append], future: asyncio.Future[list[history_pb2.AppendResult]]) -> None:
        """The same for an atomic set."""

        def answered(done: asyncio.Future[list[history_pb2.AppendResult]]) -> None:
            if not done.cancelled() and done.exception() is None:
                for append, result in zip(appends, done.result(), strict=True):
                    self.recorder.answered(append, result)

        future.add_done_callback(answered)
        self._promises.append(future)  # type: ignore[arg-type]

    async def _drive(self, conversation: Conversation, execution_id: str, producer: int) -> None:
        number = producer % len(self._producers)
        epoch = conversation.next_epoch()
        writer = self._producers[number].writer(conversation.session, execution_id, epoch)
        turn = Turn(self, conversation, writer, f"producer {number}", next(self._names))
        self.turns.append(turn)
        conversation.current = turn
        self.tell(f"{turn} by producer {number}")

    def _append_fact(self, conversation: Conversation, producer: int, event: event_pb2.Event) -> None:
        number = producer % len(self._producers)
        append = self.recorder.sent(conversation.key, event, line=f"producer {number}")
        self.promise(append, self._producers[number].append(conversation.session, event))

    def _start(self, what: str, work: Coroutine[object, object, object]) -> None:
        self.tell(what)
        task = asyncio.create_task(work, name=what)
        self._tasks.add(task)

    def _conversation(self, number: int) -> Conversation:
        return self.conversations[number % len(self.conversations)]

    def _turn(self, number: int) -> Turn | None:
        """One of the newest turns, whether it has the right to write or not."""
        newest = self.turns[-_RECENT:]
        return newest[-1 - number % len(newest)] if newest else None

    async def _writing(self, number: int) -> Turn:
        """A turn to write in: mostly one that has the right to, which is begun if there is none."""
        open_turns = [turn for turn in self.turns[-_RECENT:] if not turn.ended]
        if open_turns and number % 5 == 0:
            return open_turns[-1 - number // 5 % len(open_turns)]
        rightful = [turn for turn in open_turns if turn.conversation.current is turn and not turn.refused]
        if rightful:
            return rightful[-1 - number // 5 % len(rightful)]
        await self.begin(number, number)
        return self.turns[-1]

    def _history(self, number: int) -> RawHistory:
        return self._histories[number % len(self._histories)]

    def _relay(self, number: int) -> RawRelay:
        return self._relays[number % len(self._relays)]

    def _cursors(self, key: Key) -> list[session_pb2.Cursor]:
        """Where readers of a session have been."""
        return [
            item.cursor
            for reader in self.recording.readers
            if reader.session == key
            for connection in reader.connections
            for item in connection.events
        ]

    def _edges(self, conversation: Conversation) -> list[session_pb2.Cursor]:
        """Where readers have been, and a resume still can be; and one place from which it cannot."""
        trimmed = max(conversation.gone, default=0)
        cursors = self._cursors(conversation.key)
        kept = [cursor for cursor in cursors if cursor.sequence >= trimmed]
        edge = [conversation.gone[trimmed].cursor] if trimmed else []
        return [*edge, *[cursor for cursor in cursors if cursor.sequence < trimmed][-1:], *kept]

    async def _channel(self, address: str) -> grpc.aio.Channel:
        return await self._stack.enter_async_context(self._target.channel(address))


def _id(append: Append) -> str:
    return append.event.event_id.lower()


def _all_of(addresses: tuple[str, ...], first: int) -> str:
    """A name that means all replicas, one after the other; of addresses that are not of this machine only one."""
    place = first % len(addresses)
    if len(addresses) == 1 or not all(address.startswith("127.0.0.1:") for address in addresses):
        return addresses[place]
    return "ipv4:" + ",".join([*addresses[place:], *addresses[:place]])
