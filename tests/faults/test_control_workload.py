"""C4 in bulk: many messages that wait in many sessions, while replicas of the pool are killed at random and come back.

People send again what was not answered, and let a queue go on that a lost turn has paused, until nothing waits. Then
each message was started once, each prompt is once in the journal that agents write with fsync, and nothing is listed.
One that is not in there belongs to a turn that was lost between the row that says that its agent may have been asked
and the prompt: whoever took over could not know, so nobody asked again.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import session_pb2
from services.pool.control.executions import MAX_TRIES
from tests.checkers import control
from tests.contract.pool.house import key, text_content
from tests.support.control_caller import Caller
from tests.support.control_recording import endings, started
from tests.support.control_stage import Stage
from tests.support.servers import Servers

_AT_ONCE = 10
_LAST_TRIES = "SELECT 1 FROM pool.execution WHERE state = 'PENDING' AND tries >= $1::text::integer"
_LAST_TRY_SECONDS = 120.0


@dataclass(frozen=True)
class Shape:
    """How much of it."""

    inputs: int
    sessions: int
    crashes: int
    seed: int = 1


SMALL = Shape(inputs=24, sessions=4, crashes=2)
WHOLE = Shape(inputs=500, sessions=50, crashes=20)


class Workload:
    """All of it, on two replicas."""

    def __init__(self, stage: Stage, shape: Shape) -> None:
        self._stage = stage
        self._shape = shape
        self._dice = random.Random(shape.seed)
        self.caller = Caller(lambda: stage.backend, stage.journal)
        self.keys = [key("load") for _ in range(shape.sessions)]
        self._door = asyncio.Semaphore(_AT_ONCE)
        self._accepted = 0
        self._progress = asyncio.Event()
        self._sent = False

    async def run(self) -> None:
        """Until nothing waits."""
        per_session = self._shape.inputs // self._shape.sessions
        crashing = asyncio.create_task(self._crash())
        await asyncio.gather(*(self._send(one, per_session) for one in self.keys))
        self._sent = True
        self._progress.set()
        await crashing
        await asyncio.gather(*(self._drain(one) for one in self.keys))

    async def _call(
        self, session: session_pb2.SessionKey, request: calls.SendInputRequest | calls.ResumeQueueRequest
    ) -> None:
        """Ask until it is answered."""
        async with self._door:
            while not (await self.caller.call(session, request)).accepted:  # noqa: ASYNC110 - somebody comes back
                await asyncio.sleep(0.1)

    async def _send(self, session: session_pb2.SessionKey, number: int) -> None:
        for place in range(number):
            label = f"{session.session}-{place}"
            await self._call(
                session, calls.SendInputRequest(session=session, request_id=label, content=text_content(label))
            )
            self._accepted += 1
            self._progress.set()

    async def _crash(self) -> None:
        for number in range(1, self._shape.crashes + 1):
            # Spread over the messages that come, the last ones while what waits is worked off.
            while not self._sent and self._accepted < number * self._shape.inputs // (self._shape.crashes + 1):
                self._progress.clear()
                await self._progress.wait()
            process = self._stage.process(self._dice.choice(self._stage.house.pools))
            await asyncio.sleep(self._dice.random() / 2)
            await self._nobody_on_the_last_try()
            process.kill9()
            await process.start()

    async def _nobody_on_the_last_try(self) -> None:
        """What is killed at its start as often as it may be tried is given up, and here nothing is to be given up."""
        ends = time.monotonic() + _LAST_TRY_SECONDS
        while await self._stage.ask(_LAST_TRIES, str(MAX_TRIES)):
            assert time.monotonic() < ends, "an execution does not get past its last try"
            await asyncio.sleep(0.1)

    async def _drain(self, session: session_pb2.SessionKey) -> None:
        while True:
            async with self._door:
                shown = await self._stage.backend.session(session)
            busy = shown.execution.state != sessions.EXECUTION_STATE_TERMINAL
            if not busy and not shown.queued_inputs:
                return
            if not busy and shown.queue_paused:
                await self._call(session, calls.ResumeQueueRequest(session=session, request_id=str(uuid.uuid4())))
            await asyncio.sleep(0.1)

    async def check(self) -> int:
        """Every message once; how many were lost on the way to their agent."""
        await self._stage.told(seconds=_LAST_TRY_SECONDS)
        for one in self.keys:
            await self.caller.look(one)
        self.caller.take_journal()
        recording = self.caller.recording
        recording.settled = True
        control.check(recording)
        handed = Counter(prompt.execution_id for prompt in recording.prompts)
        runs = 0
        never = []
        for name in recording.logs:
            events = recording.events(name)
            ended = endings(events)
            for event in started(events):
                runs += 1
                assert handed[event.execution_id] <= 1
                if not handed[event.execution_id]:
                    assert ended[event.execution_id].type == "execution.lost", ended[event.execution_id]
                    never.append(event.execution_id)
            assert not recording.rows[name].waiting
        assert runs == self._shape.inputs
        return len(never)


@pytest.fixture
def stage(servers: Servers) -> Iterator[Stage]:
    """Two replicas, with room for an agent of each session."""
    found = Stage(servers, {"HEARTH_LOCAL_WARM_CAP": str(WHOLE.sessions)})
    with found.house.running():
        yield found


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(SMALL, id="small", marks=pytest.mark.timeout(180)),
        pytest.param(WHOLE, id="whole", marks=[pytest.mark.exhaustive, pytest.mark.timeout(1_200)]),
    ],
)
async def test_every_message_reaches_its_agent_once(
    stage: Stage, shape: Shape, capsys: pytest.CaptureFixture[str]
) -> None:
    work = Workload(stage, shape)
    try:
        await work.run()
        never = await work.check()
    finally:
        await stage.close()
    with capsys.disabled():
        print(f"\n{shape.inputs} messages, {shape.crashes} crashes: {never} lost on the way to their agent", flush=True)
