"""What a turn does with the requests of its agent: asked together, each answered once and apart from the others, none
after the turn is being paused."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Collection, Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hearth.session.v1 import session_pb2 as sessions
from hearth.types.v1 import event_pb2
from services.chassis.clock import SystemIds
from services.chassis.errors import InvalidArgument
from services.pool.control.gates import Policy, input_digest
from services.pool.control.interactions import NewGate, interaction_id
from services.pool.harness.assembler import TurnAssembler
from services.pool.harness.port import Answer, HarnessSession, PermissionAsked, QuestionAsked, ToolUpdate
from services.pool.rows import Claim, Decision, Execution, ExecutionState, Gate, GateKind, GateState, Key
from services.pool.turns.asking import Asking
from services.pool.turns.continuing import Decided
from services.pool.turns.limits import LimitWatch, TurnLimits
from services.pool.turns.pausing import QUIET, Pause, Why
from services.pool.turns.room import TurnRoom
from services.pool.turns.signals import Signals
from services.pool.warm.entries import Entries, EntryState
from tests.unit.pool.clocks import ManualClock, settle
from tests.unit.pool.test_entries import live

NOW = datetime(2026, 1, 1, tzinfo=UTC)
EXECUTION = Execution(
    "run", Key("p", "s"), 1, 1, ExecutionState.RUNNING, None, "", None, None, 1, "me", None, None, None, "", NOW,
    None, None, 0,
)  # fmt: skip


class Rows:
    """The gates of one execution, as the database would have them."""

    def __init__(self) -> None:
        self.gates: dict[str, Gate] = {}
        self.commits: list[list[str]] = []
        self.takes = 0
        self.may_commit = asyncio.Event()
        self.may_commit.set()

    async def ask(self, execution: Execution, holder: str, asked: Sequence[NewGate]) -> list[Gate] | None:
        await self.may_commit.wait()
        if any(len(one.input_json) > 1000 for one in asked):
            raise InvalidArgument("too large", reason="TOO_LARGE")
        self.commits.append([one.tool_name or one.prompt for one in asked])
        return [self._store(execution, one) for one in asked]

    async def take(self, execution: Execution, holder: str, *, told: Collection[str] = ()) -> list[Gate] | None:
        self.takes += 1
        for name, gate in self.gates.items():
            if gate.state is GateState.ANSWERED:
                self.gates[name] = dataclasses.replace(gate, state=GateState.CONSUMED, consumed_by="run")
        final = (GateState.CONSUMED, GateState.CLOSED)
        return [gate for name, gate in self.gates.items() if gate.state in final and name not in told]

    def _store(self, execution: Execution, one: NewGate) -> Gate:
        name = interaction_id(execution.execution_id, one.tool_call_id, one.request_key)
        request = event_pb2.InteractionRequested(tool_name=one.tool_name, input_json=one.input_json)
        self.gates[name] = Gate(
            name, execution.key, execution.execution_id, one.tool_call_id, one.request_key, one.kind,
            GateState.PENDING, request.SerializeToString(), input_digest(one.input_json), None, None, None, None,
            None, NOW, None, None, NOW,
        )  # fmt: skip
        return self.gates[name]

    def decide(self, tool: str, decision: Decision | None) -> None:
        """Somebody answers, or (None) nobody does in time."""
        for name, gate in self.gates.items():
            if event_pb2.InteractionRequested.FromString(gate.request).tool_name == tool:
                state = GateState.ANSWERED if decision is not None else GateState.CLOSED
                self.gates[name] = dataclasses.replace(gate, state=state, decision=decision, answered_by="ada")


class Agent:
    """What an agent was answered, by the key of its request."""

    def __init__(self) -> None:
        self.answers: dict[str, object] = {}

    async def answer(self, request_key: str, answer: Answer) -> None:
        assert request_key not in self.answers
        self.answers[request_key] = answer

    async def answer_question(self, request_key: str, answer_json: str | None) -> None:
        assert request_key not in self.answers
        self.answers[request_key] = answer_json


class Scene:
    """One turn that asks."""

    def __init__(self, *, decided: Decided | None = None, window: float = 600.0, cap: int = 8) -> None:
        self.clock = ManualClock()
        self.rows, self.agent, self.signals = Rows(), Agent(), Signals()
        self.told: list[event_pb2.Event] = []
        self.looks = 0
        self.ours = True
        self.entries = Entries(
            self.clock,
            SystemIds(),
            seats=8,
            close=_no_close,
            gone=lambda key: None,
            spawn=lambda name, work: asyncio.create_task(work, name=name),
        )
        self.assembler = TurnAssembler("run", SystemIds().new)
        self.limits = LimitWatch(TurnLimits(), self.clock)
        settings = SimpleNamespace(permission=Policy.ASK, approval_window=window, waiting_cap=lambda provider: cap)
        room = SimpleNamespace(
            clock=self.clock,
            settings=settings,
            entries=self.entries,
            interactions=self.rows,
            holder="me",
            outbox=SimpleNamespace(told=self._told),
            producer=SimpleNamespace(append=self._append),
            trust=SimpleNamespace(confirm=self._confirm),
        )
        self._room = cast("TurnRoom", room)
        self._decided = decided or Decided()

    def _told(self, _key: Key) -> asyncio.Future[None]:
        told: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        told.set_result(None)
        return told

    async def begin(self) -> None:
        """The agent was asked."""
        self.entry = await self.entries.reserve(Key("p", "s"), Claim(1, 1))
        self.entry.live = live()
        self.asking = Asking(
            self._room,
            EXECUTION,
            sessions.SessionSpec(),
            entry=self.entry,
            harness=cast("HarnessSession", self.agent),
            assembler=self.assembler,
            limits=self.limits,
            signals=self.signals,
            decided=self._decided,
            tool_call_limit=1800.0,
            write=lambda outputs: None,
            look=self._look,
        )
        self.running = asyncio.create_task(self.asking.run())
        await settle()

    async def asks(self, number: int, tool: str, arguments: str = "{}") -> None:
        """The agent asks for leave."""
        asked = PermissionAsked(f"k{number}", f"call-{number}", tool, "", arguments, ())
        self.assembler.take(asked)
        self.asking.heard()
        await self.asking.requested(asked)
        await settle()

    def state(self) -> EntryState:
        """What the entry of the turn is doing."""
        return self.entry.state

    async def answered(self) -> None:
        """The row says that somebody answered."""
        self.signals.raise_(answered=True)
        self.asking.wake()
        await settle()

    async def paused(self) -> Pause:
        """The turn is paused."""
        async with asyncio.timeout(5):
            return await self.running

    async def end(self) -> None:
        """The prompt is over."""
        self.running.cancel()
        await asyncio.gather(self.running, return_exceptions=True)
        self.asking.close()

    def _look(self) -> None:
        self.looks += 1

    async def _confirm(self, execution: Execution) -> bool:
        return self.ours

    def _append(self, session: object, event: event_pb2.Event) -> asyncio.Future[Any]:
        self.told.append(event)
        return asyncio.get_running_loop().create_future()


async def _no_close(entry: object, reason: object) -> None:
    return


async def test_what_comes_while_a_commit_is_under_way_is_asked_together_after_it() -> None:
    scene = Scene()
    await scene.begin()
    scene.rows.may_commit.clear()
    for number, tool in enumerate("abc"):
        await scene.asks(number, tool)
    assert scene.rows.commits == []
    scene.rows.may_commit.set()
    await settle()
    assert scene.rows.commits == [["a"], ["b", "c"]]
    assert scene.state() is EntryState.AWAITING
    await scene.end()


async def test_each_answer_is_told_once_and_the_turn_goes_on_after_the_last() -> None:
    scene = Scene()
    await scene.begin()
    await scene.asks(1, "a")
    await scene.asks(2, "b")
    scene.rows.decide("b", Decision.ALLOWED)
    await scene.answered()
    assert scene.agent.answers == {"k2": Answer.ALLOW}
    assert scene.state() is EntryState.AWAITING
    scene.rows.decide("a", None)
    await scene.answered()
    # What nobody decided in time does not run, and the agent goes on.
    assert scene.agent.answers == {"k2": Answer.ALLOW, "k1": Answer.DENY}
    assert scene.state() is EntryState.BUSY
    assert not scene.asking.waiting
    await scene.answered()
    await scene.end()


async def test_what_cannot_be_asked_is_denied_and_the_others_are_asked() -> None:
    scene = Scene()
    await scene.begin()
    scene.rows.may_commit.clear()
    await scene.asks(0, "first")
    await scene.asks(1, "large", '{"x":"' + "y" * 2000 + '"}')
    await scene.asks(2, "other")
    scene.rows.may_commit.set()
    await settle()
    assert scene.rows.commits == [["first"], ["other"]]
    assert scene.agent.answers == {"k1": Answer.DENY}
    assert scene.asking.waiting
    await scene.end()


async def test_no_time_passes_for_the_limits_while_anybody_is_asked() -> None:
    scene = Scene()
    await scene.begin()
    before = scene.limits.next()[0]
    await scene.asks(1, "a")
    await scene.clock.advance(300)
    assert scene.limits.next()[0] == pytest.approx(before)
    scene.rows.decide("a", Decision.DENIED)
    await scene.answered()
    await scene.clock.advance(50)
    assert scene.limits.next()[0] < before
    await scene.end()


async def test_when_the_window_is_over_the_entry_drains_and_hears_of_nothing_more() -> None:
    scene = Scene(window=60)
    await scene.begin()
    await scene.asks(1, "a")
    await scene.clock.advance(59)
    assert not scene.running.done()
    await scene.clock.advance(1.5)
    pause = await scene.paused()
    assert pause == Pause(Why.WINDOW, tuple(scene.rows.gates))
    assert scene.state() is EntryState.DRAINING
    takes = scene.rows.takes
    scene.rows.decide("a", Decision.ALLOWED)
    await scene.answered()
    assert (scene.rows.takes, scene.agent.answers) == (takes, {})
    scene.asking.close()
    assert scene.state() is EntryState.DRAINING


async def test_an_answer_begins_the_window_anew() -> None:
    scene = Scene(window=60)
    await scene.begin()
    await scene.asks(1, "a")
    await scene.asks(2, "b")
    await scene.clock.advance(50)
    scene.rows.decide("a", Decision.ALLOWED)
    await scene.answered()
    scene.assembler.take(ToolUpdate("call-1", status="completed", output="done"))
    scene.asking.heard()
    await scene.clock.advance(50)
    assert not scene.running.done()
    await scene.clock.advance(11)
    assert (await scene.paused()).why is Why.WINDOW


@pytest.mark.parametrize(("cap", "why"), [(8, Why.WINDOW), (0, Why.ROOM)])
async def test_calls_that_nobody_has_allowed_hold_up_no_pause(cap: int, why: Why) -> None:
    """One that the agent will ask about next, and one inside of which it asks."""
    scene = Scene(window=60, cap=cap)
    await scene.begin()
    for update in (
        ToolUpdate("outer", started=True, status="in_progress"),
        ToolUpdate("call-1", started=True, status="pending"),
        ToolUpdate("call-2", started=True, status="pending"),
    ):
        scene.assembler.take(update)
    await scene.asks(1, "a")
    if why is Why.WINDOW:
        await scene.clock.advance(59)
        assert not scene.running.done()
        await scene.clock.advance(1)
    await scene.clock.advance(QUIET)
    assert (await scene.paused()).why is why


async def test_what_was_allowed_may_give_its_result_before_the_pause() -> None:
    scene = Scene(window=60)
    await scene.begin()
    await scene.asks(1, "a")
    await scene.asks(2, "b")
    scene.rows.decide("a", Decision.ALLOWED)
    await scene.answered()
    await scene.clock.advance(200)
    assert not scene.running.done()
    scene.assembler.take(ToolUpdate("call-1", status="completed", output="done"))
    scene.asking.heard()
    await scene.clock.advance(QUIET * 2)
    assert (await scene.paused()).interaction_ids == (list(scene.rows.gates)[1],)


async def test_without_a_place_to_wait_the_turn_is_paused_once_its_agent_is_quiet() -> None:
    scene = Scene(cap=0)
    await scene.begin()
    await scene.asks(1, "a")
    await scene.asks(2, "b")
    assert scene.state() is EntryState.BUSY
    await scene.clock.advance(QUIET * 2)
    pause = await scene.paused()
    assert pause.why is Why.ROOM
    assert len(pause.interaction_ids) == 2


async def test_a_process_that_ends_waits_for_nobody() -> None:
    scene = Scene()
    await scene.begin()
    await scene.asks(1, "a")
    scene.signals.raise_(shut_down=True)
    # An agent that was told of a cancel might end its turn, and close what people are asked.
    await scene.asks(2, "b")
    assert scene.agent.answers == {}
    scene.asking.wake()
    pause = await scene.paused()
    assert (pause.why, len(pause.interaction_ids)) == (Why.LEAVING, 1)


async def test_after_a_stop_nothing_is_asked_and_nothing_allowed() -> None:
    scene = Scene(window=0)
    await scene.begin()
    scene.rows.may_commit.clear()
    await scene.asks(1, "a")
    scene.signals.raise_(stopping=True)
    scene.rows.may_commit.set()
    await settle()
    scene.rows.decide("a", Decision.ALLOWED)
    await scene.answered()
    await scene.clock.advance(10)
    assert not scene.running.done()
    assert scene.agent.answers == {}
    await scene.asks(2, "b")
    assert scene.agent.answers == {"k2": Answer.CANCELLED}
    await scene.end()
    # An agent that answers the cancel is kept.
    assert scene.state() is EntryState.BUSY


async def test_a_decision_of_before_is_used_once_and_told_to_readers() -> None:
    before = Rows()._store(EXECUTION, NewGate("call-1", "k", GateKind.APPROVAL, "a", '{"n":1}'))
    before = dataclasses.replace(before, state=GateState.CONSUMED, decision=Decision.ALLOWED, answered_by="ada")
    scene = Scene(decided=Decided([before]))
    await scene.begin()
    await scene.asks(1, "a", '{"n":2}')
    await scene.asks(2, "a", '{ "n": 1 }')
    await scene.asks(3, "a", '{"n":1}')
    assert scene.agent.answers == {"k2": Answer.ALLOW}
    assert scene.rows.commits == [["a"], ["a"]]
    (told,) = [event.interaction_resolved for event in scene.told]
    assert (told.decision, told.decided_by, told.tool_call_id) == (event_pb2.DECISION_ALLOWED, "ada", "call-2")
    await scene.end()


async def test_a_question_is_asked_whatever_tools_may_do() -> None:
    scene = Scene()
    await scene.begin()
    asked = QuestionAsked("q", "", client_tool=False, prompt="Which?", input_json="{}", schema_json="")
    scene.assembler.take(asked)
    await scene.asking.requested(asked)
    await settle()
    assert scene.rows.commits == [["Which?"]]
    await scene.end()


async def test_an_answer_that_was_passed_on_is_not_given_by_a_replica_that_was_given_up_meanwhile() -> None:
    """As one that was frozen between the two."""
    scene = Scene()
    await scene.begin()
    await scene.asks(1, "a")
    scene.ours = False
    scene.rows.decide("a", Decision.ALLOWED)
    await scene.answered()
    assert [gate.state for gate in scene.rows.gates.values()] == [GateState.CONSUMED]
    assert scene.agent.answers == {}
    assert scene.looks == 1
    await scene.end()
