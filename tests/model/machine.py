"""The rules by which Hypothesis plays with a few sessions of one pool: every one is compared with the model at once."""

from __future__ import annotations

import asyncio
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Coroutine
from typing import Any, ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from tests.checkers import control
from tests.model.conversation import REST_SECONDS, Conversation, Request
from tests.model.worlds import ASKS, CROWDED, HELD, QUICK, Answer
from tests.support.control_caller import Caller
from tests.support.control_stage import Stage, specs

SESSIONS = 3
# Kinds of messages and of haste, each as often as it stands here.
KINDS = [QUICK, QUICK, QUICK, HELD, HELD, ASKS]
HASTES = ["QUEUE", "QUEUE", "QUEUE", "REJECT", "STEER"]

# Most messages say nothing of the spec of their session.
SPECS = [None] * 12 + list(specs().values())

_NUMBER = st.integers(0, 999)
_SESSION = st.integers(0, SESSIONS - 1)


class Tally:
    """What all plays together did."""

    def __init__(self) -> None:
        self.steps: Counter[str] = Counter()
        self.answers: Counter[str] = Counter()
        self.seconds: dict[str, float] = defaultdict(float)
        self.checked: Counter[str] = Counter()
        self.plays = 0
        # Stories of what must not be, the first one first.
        self.failures: list[str] = []

    def __str__(self) -> str:
        lines = [
            f"{title}: {', '.join(f'{count} {name}' for name, count in counts.most_common())}"
            for title, counts in (("steps", self.steps), ("answers", self.answers), ("looked at", self.checked))
        ]
        took = ", ".join(f"{name} {took:.1f}" for name, took in sorted(self.seconds.items(), key=lambda one: -one[1]))
        return "\n".join([f"{self.plays} plays, {self.steps.total()} steps", *lines, f"seconds: {took}"])


class ControlMachine(RuleBasedStateMachine):
    """One play. The class is told by `of` on which services."""

    stage: ClassVar[Stage]
    tally: ClassVar[Tally]
    loop: ClassVar[asyncio.Runner]
    # Each costs the start of a process.
    most_crashes: ClassVar[int] = 1_000

    def __init__(self) -> None:
        super().__init__()
        self._idle = False
        self._crashes = 0
        self.story: list[str] = []
        self._caller = Caller(lambda: self.stage.backend, self.stage.journal)
        self._sessions = [
            Conversation(self.stage, self._caller, f"s{number}", self.story) for number in range(SESSIONS)
        ]

    @classmethod
    def of(cls, stage: Stage, tally: Tally, loop: asyncio.Runner, *, most_crashes: int) -> type[ControlMachine]:
        """A machine on these services, whose calls run in this loop. `most_crashes` is for one play."""
        own = {"stage": stage, "tally": tally, "loop": loop, "most_crashes": most_crashes}
        return type("ControlMachine", (cls,), own)

    def _play(self, what: str, work: Coroutine[Any, Any, object]) -> None:
        if self._idle:
            work.close()
            return
        self.tally.steps[what] += 1
        began = time.monotonic()
        try:
            self.loop.run(work)
            self.tally.seconds[what] += round(time.monotonic() - began, 2)
        except Exception as error:
            told = f"{type(error).__name__}: {error}\n\nwhat was done:\n" + "\n".join(self.story[-120:])
            self.tally.failures.append(told)
            raise AssertionError(told) from error

    async def _do(self, session: Conversation, *requests: Request | None) -> None:
        made = [request for request in requests if request is not None]
        if len(session.worlds) > CROWDED:
            await session.rest()
        answers = await session.do(*made)
        await session.until_told(made, answers)
        self._count(made, answers)

    def _count(self, made: list[Request], answers: list[Answer]) -> None:
        for request, answer in zip(made, answers, strict=True):
            what = request.words.split()[0].rpartition(".")[2].rstrip("0123456789")
            self.tally.answers[f"{what}: {answer[0]}"] += 1

    @initialize(dice=st.integers(0, 2**20))
    def begin(self, dice: int) -> None:
        """Sessions are made by their first message. The first play that Hypothesis makes is the simplest one, which
        would be one rule again and again: nothing is done in it."""
        self._idle = dice == 0
        self._play("rotate", self._sessions[0].rotate())
        for session in self._sessions:
            self._play("first message", self._do(session, session.send(QUICK, "QUEUE")))

    # What a rule may pick

    def _request(self, session: Conversation, what: int, which: int) -> Request | None:
        """Any request; None where there is nothing that it could be about."""
        messages, executions, gates = session.messages, session.executions, session.open_gates
        match what % 12:
            case 0 | 1 | 2 | 3:
                return session.send(
                    KINDS[which % len(KINDS)], HASTES[which // 7 % len(HASTES)], SPECS[which // 3 % len(SPECS)]
                )
            case 4 | 5 if executions:
                # Mostly the newest: others are refused.
                label = executions[-1] if which % 4 else executions[which % len(executions)]
                return session.stop(label, by_epoch=which % 3 == 0)
            case 6 if messages:
                return session.remove(messages[-1 - which % min(4, len(messages))])
            case 7 if messages:
                return session.update(messages[-1 - which % min(4, len(messages))])
            case 8 if messages:
                return session.now(messages[-1 - which % min(4, len(messages))])
            case 9:
                return session.resume()
            case 10 | 11 if gates:
                label, gate = gates[-1 - which % min(3, len(gates))]
                decision = ("ALLOWED", "DENIED")[which // 3 % 2]
                both = which % 5 == 0 and all((label, name) in gates for name in ("t1", "t2"))
                return session.answer(label, [("t1", decision), ("t2", "ALLOWED")] if both else [(gate, decision)])
        return None

    # Rules

    @rule(
        number=_SESSION,
        kind=st.sampled_from(KINDS),
        on_busy=st.sampled_from(HASTES),
        spec=st.integers(0, len(SPECS) - 1),
    )
    def send(self, number: int, kind: str, on_busy: str, spec: int) -> None:
        """A message."""
        session = self._sessions[number]
        self._play("send", self._do(session, session.send(kind, on_busy, SPECS[spec])))

    @rule(number=_SESSION, what=_NUMBER, which=_NUMBER)
    def ask_anything(self, number: int, what: int, which: int) -> None:
        """Any request."""
        session = self._sessions[number]
        self._play("request", self._do(session, self._request(session, what, which)))

    @rule(number=_SESSION, what=_NUMBER, which=_NUMBER, other=_NUMBER)
    def ask_two_things(self, number: int, what: int, which: int, other: int) -> None:
        """Two requests at the same time."""
        session = self._sessions[number]
        first, second = self._request(session, what, which), self._request(session, other, which // 2)
        self._play("race", self._do(session, first, second))

    @rule(number=_SESSION, which=_NUMBER)
    def ask_again(self, number: int, which: int) -> None:
        """A request that was made before."""
        session = self._sessions[number]
        if session.made:
            again = session.made[-1 - which % min(8, len(session.made))]
            self._play("again", self._do(session, again))

    @rule(number=_SESSION, which=_NUMBER)
    def let_go(self, number: int, which: int) -> None:
        """A turn that was held may end; mostly the newest."""
        session = self._sessions[number]
        held = session.held
        if held and not self._idle:
            session.let_go(held[-1 - which % min(3, len(held))])
            self.tally.steps["let go"] += 1

    @rule(number=_SESSION, what=_NUMBER, which=_NUMBER)
    def let_go_and_ask(self, number: int, what: int, which: int) -> None:
        """A turn ends while something is asked."""
        session = self._sessions[number]
        if session.held and not self._idle:
            session.let_go(session.held[-1])
            self._play("completion race", self._do(session, self._request(session, what, which)))

    @rule(number=_SESSION)
    def look(self, number: int) -> None:
        """What the session shows."""
        self._play("look", self._sessions[number].look())

    @rule(number=_SESSION)
    def look_at_queue(self, number: int) -> None:
        """What waits."""
        self._play("queue", self._sessions[number].look_at_queue())

    @rule(number=_SESSION)
    def look_at_gates(self, number: int) -> None:
        """What is asked."""
        self._play("gates", self._sessions[number].look_at_gates())

    @rule(number=_SESSION, which=_NUMBER)
    def answer_all(self, number: int, which: int) -> None:
        """All questions that wait are answered, one call each, at the same time."""
        session = self._sessions[number]

        async def answered() -> None:
            waiting = await session.look_at_gates()
            decisions = ("ALLOWED", "DENIED")
            await self._do(
                session,
                *(
                    session.answer(label, [(gate, decisions[(which + place) % 2])])
                    for place, (label, gate) in enumerate(waiting)
                ),
            )

        self._play("answer all", answered())

    @rule(number=_SESSION)
    def rest(self, number: int) -> None:
        """Nothing moves any more, and all is compared."""
        self._play("rest", self._sessions[number].rest())

    @rule(number=_SESSION, sure=st.integers(0, 9))
    def kill(self, number: int, sure: int) -> None:
        """Kill a session; rarely, as it costs a sandbox."""
        session = self._sessions[number]
        if sure == 0:
            self._play("kill", self._do(session, session.kill()))

    @rule(number=_SESSION, sure=st.integers(0, 2))
    def rotate(self, number: int, sure: int) -> None:
        """Another value of a credential; rarely, as agents that have it are started anew."""
        if sure == 0:
            self._play("rotate", self._sessions[number].rotate())

    @rule(number=_SESSION, sure=st.integers(0, 2))
    def expire(self, number: int, sure: int) -> None:
        """The time of what is asked is over."""
        session = self._sessions[number]
        if sure == 0:
            self._play("expire", session.expire())

    @rule(what=_NUMBER, which=_NUMBER, sure=st.integers(0, 11), later=st.integers(0, 20), second=st.booleans())
    def crash(self, what: int, which: int, sure: int, later: int, second: bool) -> None:
        """kill -9 of a replica while something is asked of each session, some milliseconds after it was sent. The other
        one takes over what it drove; it comes back as a new one."""
        if sure == 0 and self._crashes < self.most_crashes:
            self._crashes += 1
            self._play("crash", self._crash(what, which, later, self.stage.house.pools[second]))

    async def _crash(self, what: int, which: int, later: int, name: str) -> None:
        holder = await self.stage.holder_of(name)
        dead = asyncio.Event()
        asked: list[tuple[Conversation, list[Request], Awaitable[list[Answer]]]] = []
        for place, session in enumerate(self._sessions):
            request = self._request(session, what + 5 * place, which + place)
            requests = [request] if request is not None else []
            asked.append((session, requests, asyncio.ensure_future(session.do(*requests, meanwhile=dead.wait))))  # type: ignore[arg-type]
        await asyncio.sleep(later / 1000)
        replica = self.stage.house.processes[name]
        replica.kill9()
        mark, driven = len(self.stage.journal()), await self.stage.driven_by(holder)
        self.story.append(f"{name} died, {later} ms later")
        dead.set()
        answers = [await answering for _, _, answering in asked]
        for session in self._sessions:
            if session.key.session in driven:
                session.crash_mark = mark
                session.crashed()
        for (session, requests, _), found in zip(asked, answers, strict=True):
            await session.until_told(requests, found)
            self._count(requests, found)
        await replica.start()

    # The end

    def teardown(self) -> None:
        """Everything comes to its end, the checkers look at all of it, and no sandbox is left."""
        self._play("end", self._end())

    async def _end(self) -> None:
        for session in self._sessions:
            for label in session.held:
                session.let_go(label)
        for session in self._sessions:
            await session.rest()
            while waiting := await session.look_at_gates():
                await self._do(session, *(session.answer(label, [(gate, "ALLOWED")]) for label, gate in waiting))
                await session.rest()
        await self.stage.told(seconds=REST_SECONDS)
        for session in self._sessions:
            await self._caller.look(session.key)
        self._caller.take_journal()
        self._caller.recording.settled = True
        self.tally.checked.update(control.check(self._caller.recording))
        self.tally.plays += 1
        for session in self._sessions:
            await self._do(session, session.kill())
