"""The small model of a session: what may be true of it, and how each request changes that and is answered.

Nobody can know when a turn ends or a sandbox is there, so there is not one model state but a set of worlds. Before a
request each of them may go on by itself (`onward`); the request is applied to all, and those stay in which it would
have been answered as it was. None left means that the pool did what it must not.

Executions are named by the label of the input that they run, a continuation by that of its source and a `+`; requests
by their ids, which for a message is its label.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

# What an input asks of the agent: to answer at once, to go on until it is let go, to ask for leave several times.
QUICK, HELD, ASKS = "quick", "held", "asks"
GATES = ("t1", "t2")
# More than anything sensible leads to; a session that is left alone before that comes to few again.
MOST_WORLDS = 4_000
CROWDED = 100

Answer: TypeAlias = "tuple[object, ...]"
ANY: Answer = ("any",)


@dataclass(frozen=True)
class Gate:
    """A question for leave. `decision` is empty before an answer."""

    name: str
    state: str = "PENDING"
    decision: str = ""
    # Its time is over: no answer is taken any more, and somebody will close it.
    expired: bool = False


@dataclass(frozen=True)
class Run:
    """An execution that has not ended, or is paused. `asked` are the gates there are so far."""

    label: str
    kind: str
    asked: tuple[Gate, ...] = ()
    killed: bool = False
    # How often its driver died while it ran; 0 again once it is known to be driven.
    crashes: int = 0

    def gate(self, name: str) -> Gate | None:
        """The gate of a tool."""
        return next((gate for gate in self.asked if gate.name == name), None)

    def with_gate(self, changed: Gate) -> Run:
        """With another state of a gate."""
        return replace(self, asked=tuple(changed if gate.name == changed.name else gate for gate in self.asked))

    @property
    def open_gates(self) -> int:
        """Gates that wait for an answer."""
        return sum(gate.state == "PENDING" for gate in self.asked)

    @property
    def waits(self) -> bool:
        """Whether it is WAITING: a gate is not closed."""
        return any(gate.state in ("PENDING", "ANSWERED") for gate in self.asked)


@dataclass(frozen=True)
class Cancel:
    """A command. `outcome` is empty while it is open; `steer` is the input that it is bound to."""

    name: str
    target: str
    outcome: str = ""
    steer: str = ""


def cancel_of(label: str) -> str:
    """The name of the command that asks what runs to stop: there is one, whoever came first."""
    return f"cancel of {label}"


@dataclass(frozen=True)
class World:
    """One session as it may be. `ended` are all executions in order of their start, with their outcomes."""

    active: Run | None = None
    # Ended as paused, with gates that are open.
    parked: Run | None = None
    queue: tuple[str, ...] = ()
    paused: bool = False
    ended: tuple[tuple[str, str], ...] = ()
    removed: frozenset[str] = frozenset()
    cancels: tuple[Cancel, ...] = ()
    # Request id → name of the command that it made or joined, or empty.
    requests: tuple[tuple[str, str], ...] = ()
    # Inputs that need not be held any more.
    let_go: frozenset[str] = frozenset()

    # Looking

    def outcome(self, label: str) -> str | None:
        """The outcome of an execution, empty while it has none, None when it never started."""
        return dict(self.ended).get(label)

    def cancel_of(self, label: str) -> Cancel | None:
        """The open cancel of an execution."""
        return next((one for one in self.cancels if one.target == label and not one.outcome), None)

    def bound(self, label: str) -> Cancel | None:
        """The open cancel that an input waits for."""
        return next((one for one in self.cancels if one.steer == label and not one.outcome), None)

    def done(self, request: str) -> bool:
        """Whether a request was accepted before."""
        return any(request == name for name, _ in self.requests)

    def named(self, request: str) -> Cancel:
        """The command that a request made or joined."""
        name = dict(self.requests)[request]
        return next(one for one in self.cancels if one.name == name)

    @property
    def busy(self) -> bool:
        """Whether a message has to wait."""
        return self.active is not None or self.parked is not None

    # Changing

    def noted(self, request: str, command: str = "") -> World:
        """After a request was accepted."""
        return replace(self, requests=(*self.requests, (request, command)))

    def start(self, label: str, kind: str) -> World:
        """A new execution."""
        return replace(
            self,
            active=Run(label, kind),
            queue=tuple(one for one in self.queue if one != label),
            paused=False,
            ended=(*self.ended, (label, "")),
        )

    def with_outcome(self, label: str, outcome: str) -> World:
        """After an execution ended so."""
        return replace(self, ended=tuple((one, outcome if one == label else was) for one, was in self.ended))

    def with_cancel(self, changed: Cancel) -> World:
        """With another state of a command."""
        return replace(self, cancels=tuple(changed if one.name == changed.name else one for one in self.cancels))


class Rules:
    """How worlds change. `kinds` says of each label what its input asks for."""

    def __init__(self, kinds: dict[str, str]) -> None:
        self._kinds = kinds
        # Several requests are under way: one may come between the two looks of another.
        self.racing = False

    # By themselves

    def onward(self, worlds: Iterable[World]) -> set[World]:
        """These worlds, and all that may come of them with nobody doing anything."""
        seen = set(worlds)
        new = list(seen)
        while new:
            for after in self._steps(new.pop()):
                if after not in seen:
                    seen.add(after)
                    new.append(after)
            assert len(seen) <= MOST_WORLDS, "there is no telling any more what may be true"
        return seen

    def quiet(self, world: World) -> bool:
        """Whether nothing more comes of a world by itself."""
        return next(self._steps(world), None) is None

    def _steps(self, world: World) -> Iterator[World]:
        for run in (world.active, world.parked):
            for gate in run.asked if run is not None else ():
                if gate.expired and gate.state == "PENDING":
                    yield self._expire(world, gate)
        run = world.active
        if run is None:
            return
        stopping = world.cancel_of(run.label) is not None
        if run.killed:
            yield self.end(world, "stopped")
        if run.crashes and not run.killed:
            yield self.end(world, "stopped" if stopping else "paused" if run.waits else "lost")
            if run.crashes >= 3:
                yield self.end(world, "failed")
        kind = self._kind(world, run.label)
        if stopping:
            yield self.end(world, "stopped")
        if kind == ASKS and not stopping:
            yield from self._asking(world, run)
        asked_all = kind != ASKS or (
            len(run.asked) == len(GATES) and all(gate.state in ("CONSUMED", "CLOSED") for gate in run.asked)
        )
        if kind != HELD and asked_all:
            yield self.end(world, "completed")

    def _expire(self, world: World, gate: Gate) -> World:
        shut = replace(gate, state="CLOSED")
        if world.active is not None and gate in world.active.asked:
            return replace(world, active=world.active.with_gate(shut))
        assert world.parked is not None
        return self._go_on(replace(world, parked=world.parked.with_gate(shut)))

    def _asking(self, world: World, run: Run) -> Iterator[World]:
        for name in GATES:
            gate = run.gate(name)
            if gate is None:
                yield replace(world, active=replace(run, asked=tuple(sorted((*run.asked, Gate(name)), key=str))))
            elif gate.state == "ANSWERED":
                yield replace(world, active=run.with_gate(replace(gate, state="CONSUMED")))

    def _kind(self, world: World, label: str) -> str:
        if label in world.let_go or label.endswith("+"):
            return QUICK
        return self._kinds[label]

    def end(self, world: World, outcome: str) -> World:
        """The one transaction that settles what runs."""
        run = world.active
        assert run is not None
        world = replace(world.with_outcome(run.label, outcome), active=None)
        cancel = world.cancel_of(run.label)
        steer = ""
        if cancel is not None:
            told = {"stopped": "STOPPED", "lost": "LOST"}.get(outcome, "NOT_RUNNING")
            world = world.with_cancel(replace(cancel, outcome=told, steer=""))
            steer = cancel.steer if outcome != "lost" else ""
        if steer:
            return world.start(steer, self._kinds[steer])
        if outcome == "paused" and cancel is None:
            return self._go_on(replace(world, parked=run))
        # A queue that is not paused although something was cancelled was resumed since, or had to make way only.
        if outcome == "completed" or (outcome == "stopped" and cancel is not None and not world.paused):
            return (
                world if world.paused or not world.queue else world.start(world.queue[0], self._kinds[world.queue[0]])
            )
        return replace(world, paused=True)

    def _go_on(self, world: World) -> World:
        """What follows when a paused execution, or an answer to it, was committed."""
        run = world.parked
        if run is None or any(gate.state == "PENDING" for gate in run.asked):
            return world
        world = replace(world, parked=None)
        if any(gate.state == "ANSWERED" for gate in run.asked):
            paused = world.paused
            return replace(world.start(f"{run.label}+", QUICK), paused=paused)
        return replace(world, paused=True)

    # Requests: each gives the answers that are possible, with the world after each

    def send(self, world: World, label: str, on_busy: str) -> Iterator[tuple[Answer, World]]:
        """SendInput under its label."""
        if world.done(label):
            yield self._present(world, label), world
        elif on_busy == "STEER":
            for meant, then in self._second_look(world):
                yield from self._steer(then.noted(label), label, meant)
        elif not world.busy:
            resumed = world.queue if world.paused else ()
            yield ("started", "", resumed), world.noted(label).start(label, self._kinds[label])
        elif on_busy == "REJECT":
            yield ("refused", "SESSION_BUSY"), world
        else:
            after = replace(world.noted(label), queue=(*world.queue, label))
            yield ("queued", len(after.queue)), after

    def _present(self, world: World, label: str) -> Answer:
        outcome = world.outcome(label)
        if outcome is not None:
            return ("started", outcome, ())
        if label in world.removed:
            return ("removed",)
        bound = world.bound(label)
        if bound is not None:
            return ("steered", bound.target, bound.outcome)
        return ("queued", world.queue.index(label) + 1)

    def _second_look(self, world: World) -> Iterator[tuple[str, World]]:
        """Who wants to be next is looked at twice: what it found the first time is what it means to stop."""
        if world.active is None:
            yield "", world
            return
        for then in self.onward({world}):
            yield world.active.label, then
            if self.racing:
                yield "another", then

    def _steer(self, world: World, label: str, meant: str) -> Iterator[tuple[Answer, World]]:
        """A new message that is to run next, of which the world knows already that it was asked for."""
        run = world.active
        if run is None:
            # Open gates are in the way at most, and they are closed.
            resumed = world.queue if world.paused else ()
            yield ("started", "", resumed), replace(world, parked=None).start(label, self._kinds[label])
            return
        cancel = world.cancel_of(run.label)
        if meant != run.label:
            yield ("queued", 1), replace(world, queue=(label, *world.queue))
        elif cancel is not None and cancel.steer:
            yield ("queued", len(world.queue) + 1), replace(world, queue=(*world.queue, label))
        else:
            yield ("steered", run.label, ""), self._bound(replace(world, queue=(label, *world.queue)), label)

    def _bound(self, world: World, label: str) -> World:
        """An input at the head of the queue waits for a cancel of what runs."""
        run = world.active
        assert run is not None
        cancel = world.cancel_of(run.label)
        if cancel is not None:
            return world.with_cancel(replace(cancel, steer=label))
        made = Cancel(cancel_of(run.label), run.label, steer=label)
        return replace(world, cancels=(*world.cancels, made), active=self._closed(run))

    @staticmethod
    def _closed(run: Run) -> Run:
        shut = tuple(
            replace(gate, state="CLOSED") if gate.state in ("PENDING", "ANSWERED") else gate for gate in run.asked
        )
        return replace(run, asked=shut)

    def stop(self, world: World, request: str, target: str, *, by_epoch: bool) -> Iterator[tuple[Answer, World]]:
        """StopExecution of `target`, by its id, or by the epoch at which it started."""
        if world.done(request):
            found = world.named(request)
            yield ("command", found.target, found.outcome), world
            return
        run = world.active or world.parked
        if run is None:
            known = "" if by_epoch else target
            made = Cancel(request, known, "NOT_RUNNING")
            yield (
                ("command", known, "NOT_RUNNING"),
                replace(world, cancels=(*world.cancels, made)).noted(request, request),
            )
            return
        order = [label for label, _ in world.ended]
        if by_epoch and target not in order:
            # Its epoch was seen, so this is no world that can be.
            return
        hit = order.index(run.label) <= order.index(target) if by_epoch else run.label == target
        if not hit:
            yield ("refused", "EXECUTION_MISMATCH"), world
            return
        if world.active is None:
            made = Cancel(request, run.label, "NOT_RUNNING")
            after = replace(world, cancels=(*world.cancels, made), parked=None)
            yield ("command", run.label, "NOT_RUNNING"), replace(after, paused=True).noted(request, request)
            return
        after = replace(world, paused=True)
        cancel = world.cancel_of(run.label)
        if cancel is None:
            cancel = Cancel(cancel_of(run.label), run.label)
            after = replace(after, cancels=(*after.cancels, cancel))
        elif cancel.steer:
            # A plain Stop means that nothing is to run next.
            cancel = replace(cancel, steer="")
            after = after.with_cancel(cancel)
        yield ("command", run.label, ""), replace(after, active=self._closed(run)).noted(request, cancel.name)

    def remove(self, world: World, request: str, label: str) -> Iterator[tuple[Answer, World]]:
        """RemoveInput."""
        left = tuple(one for one in world.queue if one != label)
        yield from self._of_waiting(
            world, request, label, lambda: replace(world, queue=left, removed=world.removed | {label})
        )

    def update(self, world: World, request: str, label: str) -> Iterator[tuple[Answer, World]]:
        """UpdateInput, by a text that asks for the same."""
        yield from self._of_waiting(world, request, label, lambda: world)

    @staticmethod
    def _of_waiting(
        world: World, request: str, label: str, change: Callable[[], World]
    ) -> Iterator[tuple[Answer, World]]:
        if world.done(request):
            yield ("done",), world
        elif label in world.queue and world.bound(label) is None:
            yield ("done",), change().noted(request)
        else:
            yield ("refused", "INPUT_NOT_PENDING"), world

    def now(self, world: World, request: str, label: str) -> Iterator[tuple[Answer, World]]:
        """SendInputNow."""
        if world.done(request):
            yield self._present(world, label)[:3], world
            return
        if label not in world.queue:
            yield ("refused", "INPUT_NOT_PENDING"), world
            return
        for meant, then in self._second_look(world):
            if label not in then.queue:
                yield ("refused", "INPUT_NOT_PENDING"), then
                continue
            run = then.active
            after = then.noted(request)
            if run is None:
                yield ("started", "", ()), replace(after, parked=None).start(label, self._kinds[label])
                continue
            cancel = then.cancel_of(run.label)
            if cancel is not None and cancel.steer == label:
                yield ("steered", run.label, ""), after
            elif meant != run.label:
                yield ("refused", "EXECUTION_MISMATCH"), then
            elif cancel is not None and cancel.steer:
                yield ("refused", "SESSION_BUSY"), then
            else:
                others = tuple(one for one in then.queue if one != label)
                yield ("steered", run.label, ""), self._bound(replace(after, queue=(label, *others)), label)

    def resume(self, world: World, request: str) -> Iterator[tuple[Answer, World]]:
        """ResumeQueue."""
        if world.done(request):
            yield ANY, world
            return
        after = replace(world.noted(request), paused=False)
        if world.busy or not world.queue:
            yield ("resumed", ""), after
        else:
            yield ("resumed", world.queue[0]), after.start(world.queue[0], self._kinds[world.queue[0]])

    def kill(self, world: World, request: str) -> Iterator[tuple[Answer, World]]:
        """KillSession."""
        if world.done(request):
            yield ("done",), world
            return
        run = world.active
        after = replace(
            world.noted(request),
            active=replace(self._closed(run), killed=True) if run is not None else None,
            parked=None,
            queue=(),
            removed=world.removed | set(world.queue),
        )
        for cancel in after.cancels:
            after = after.with_cancel(replace(cancel, steer=""))
        yield ("done",), after

    def answer(
        self, world: World, request: str, label: str, decisions: Sequence[tuple[str, str]]
    ) -> Iterator[tuple[Answer, World]]:
        """AnswerInteractions: decisions by gate, all of one execution. Those that were asked are known to be so."""
        if world.done(request):
            yield ("done",), world
            return
        run = next((one for one in (world.active, world.parked) if one is not None and one.label == label), None)
        gates = [run.gate(name) if run is not None else None for name, _ in decisions]
        if any(gate is None or gate.state != "PENDING" or gate.expired for gate in gates):
            yield ("refused", "INTERACTION_CLOSED"), world
            return
        assert run is not None
        for name, decision in decisions:
            run = run.with_gate(Gate(name, "ANSWERED", decision))
        if world.active is not None and world.active.label == label:
            yield ("done",), replace(world, active=run).noted(request)
        else:
            yield ("done",), self._go_on(replace(world, parked=run)).noted(request)

    # What is done to it from outside

    def let_go(self, world: World, label: str) -> Iterator[tuple[Answer, World]]:
        """A held input may end."""
        yield (), replace(world, let_go=world.let_go | {label})

    def expire(self, world: World) -> Iterator[tuple[Answer, World]]:
        """The time of all questions that wait is over."""
        for name in ("active", "parked"):
            run = getattr(world, name)
            if run is not None:
                late = tuple(replace(gate, expired=gate.expired or gate.state == "PENDING") for gate in run.asked)
                world = replace(world, **{name: replace(run, asked=late)})
        yield (), world

    def crash(self, world: World) -> Iterator[tuple[Answer, World]]:
        """Who drives it died."""
        run = world.active
        yield (), replace(world, active=replace(run, crashes=run.crashes + 1) if run is not None else None)

    def driven(self, world: World) -> Iterator[tuple[Answer, World]]:
        """What runs was seen to be driven after whatever died."""
        run = world.active
        yield (), replace(world, active=replace(run, crashes=0) if run is not None else None)

    # What it shows

    def shown(self, world: World) -> Iterator[tuple[Answer, World]]:
        """The session row: how many wait, whether the queue is paused, how many gates are open."""
        run = world.active or world.parked
        yield (len(world.queue), world.paused, run.open_gates if run is not None else 0), world

    def newest(self, world: World) -> Iterator[tuple[Answer, World]]:
        """The newest execution, and its outcome."""
        yield world.ended[-1] if world.ended else ("", ""), world

    def waiting(self, world: World) -> Iterator[tuple[Answer, World]]:
        """The queue."""
        yield world.queue, world

    def gates(self, world: World, label: str) -> Iterator[tuple[Answer, World]]:
        """The gates of the execution that is active or parked: name, state, decision of each."""
        run = next((one for one in (world.active, world.parked) if one is not None and one.label == label), None)
        if run is None:
            yield ANY, world
        else:
            yield tuple((gate.name, gate.state, gate.decision) for gate in run.asked), world

    def command(self, world: World, name: str) -> Iterator[tuple[Answer, World]]:
        """What came of a command."""
        found = next((one for one in world.cancels if one.name == name), None)
        yield (found.outcome,) if found is not None else ANY, world

    def execution(self, world: World, label: str) -> Iterator[tuple[Answer, World]]:
        """How an execution ended."""
        yield (world.outcome(label),), world


Op: TypeAlias = "Callable[[World], Iterator[tuple[Answer, World]]]"


def after(rules: Rules, worlds: Iterable[World], *done: tuple[Op, Answer]) -> set[World]:
    """The worlds in which these requests, made at the same time, are answered so, in whatever order they came."""
    found: set[World] = set()
    for order in itertools.permutations(done):
        reached = set(worlds)
        for op, answer in order:
            reached = {
                changed
                for world in rules.onward(reached)
                for possible, changed in op(world)
                if answer == ANY or possible in (answer, ANY)
            }
        found |= reached
    return found


def distinct(worlds: Iterable[World]) -> set[World]:
    """One of those each that differ only in what was answered to whom long ago."""
    found: dict[object, World] = {}
    for world in worlds:
        found.setdefault(replace(world, cancels=(), requests=()), world)
    return set(found.values())


def not_done(worlds: Iterable[World], op: Op, rules: Rules) -> set[World]:
    """The worlds after a request of which nobody knows whether it was done."""
    return set(worlds) | after(rules, worlds, (op, ANY))
