"""One session under test: its requests as calls and as operations of the model, and the worlds that are left.

A request is a `Request`: how to call it, how to read its answer, and what it does to a world. Several may be made at
the same time, and one of which no answer came is made again until there is one.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from google.protobuf.message import Message

from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import event_pb2, session_pb2
from services.chassis.errors import HearthError
from tests.contract.pool.house import text_content
from tests.model.worlds import ANY, CROWDED, HELD, Answer, Op, Rules, World, after, cancel_of, distinct, not_done
from tests.support.control_caller import Caller
from tests.support.control_recording import Call, messages_in, text_of
from tests.support.control_stage import CREDENTIAL, Stage, quietly

# Within this everything that moves has come to rest, whatever else the machine does.
REST_SECONDS = 60.0
# What may move, and may as well not, has moved within this: every sweep has come by.
_UNSURE_SECONDS = 3.0

ON_BUSY = {"QUEUE": sessions.ON_BUSY_QUEUE, "REJECT": sessions.ON_BUSY_REJECT, "STEER": sessions.ON_BUSY_STEER}
_DECISIONS = {"ALLOWED": event_pb2.DECISION_ALLOWED, "DENIED": event_pb2.DECISION_DENIED}
_NOT_TOLD: Answer = ("not told",)


@dataclass(frozen=True)
class Request:
    """Something that is asked of the pool. `words` say what, for the story."""

    words: str
    call: Callable[[], Awaitable[Call]]
    read: Callable[[Call], Answer]
    op: Op


class Conversation:
    """A session with a model of its own."""

    def __init__(self, stage: Stage, caller: Caller, name: str, story: list[str]) -> None:
        self.key = session_pb2.SessionKey(project="acme", session=f"{name}-{uuid.uuid4().hex[:12]}")
        self.name = name
        self._stage = stage
        self._caller = caller
        self._story = story
        self._kinds: dict[str, str] = {}
        self.rules = Rules(self._kinds)
        self.worlds: set[World] = {World()}
        # What the pool made: the label of an input by its id, that of an execution, the name of a command.
        self._labels: dict[str, str] = {}
        self._executions: dict[str, str] = {}
        self._commands: dict[str, str] = {}
        self._epochs: dict[str, int] = {}
        self._gates: dict[tuple[str, str], str] = {}
        self._numbers = 0
        self.made: list[Request] = []

    # What there is to aim at

    @property
    def messages(self) -> list[str]:
        """Labels of all messages that were accepted."""
        return [label for label in self._kinds if label in self._labels.values()]

    @property
    def executions(self) -> list[str]:
        """Labels of the executions that were seen."""
        return list(self._epochs)

    @property
    def held(self) -> list[str]:
        """Labels of messages whose turns go on until they are let go."""
        return [label for label, kind in self._kinds.items() if kind == HELD]

    @property
    def accepted(self) -> bool:
        """Whether the session exists."""
        return bool(self._labels)

    def _new(self, what: str) -> str:
        self._numbers += 1
        return f"{self.name}.{what}{self._numbers}"

    def _id_of(self, labels: dict[str, str], label: str) -> str:
        return next(found for found, name in labels.items() if name == label)

    # Requests

    def send(self, kind: str, on_busy: str, spec: sessions.SessionSpec | None = None) -> Request:
        """A new message. With `spec` the session has another one from then on."""
        label = f"{self._new(kind)}-{self.key.session[-12:]}"
        self._kinds[label] = kind
        request = calls.SendInputRequest(
            session=self.key,
            request_id=label,
            content=text_content(self._stage.text(label, kind)),
            on_busy=ON_BUSY[on_busy],
            spec=spec,
        )
        return self._request(
            f"send {label} ({on_busy})",
            request,
            lambda call: self._sent(label, call.response),
            lambda world: self.rules.send(world, label, on_busy),
        )

    def stop(self, label: str, *, by_epoch: bool) -> Request:
        """A Stop of an execution."""
        name = self._new("stop")
        request = calls.StopExecutionRequest(session=self.key, request_id=name)
        if by_epoch:
            request.seen_epoch = self._epochs[label]
        else:
            request.execution_id = self._id_of(self._executions, label)
        return self._request(
            f"{name} of {label}{' by its epoch' if by_epoch else ''}",
            request,
            lambda call: ("command", *self._told_of(name, call.response.command)),  # type: ignore[union-attr]
            lambda world: self.rules.stop(world, name, label, by_epoch=by_epoch),
        )

    def remove(self, label: str) -> Request:
        """Take a message out of the queue."""
        name = self._new("remove")
        request = calls.RemoveInputRequest(session=self.key, request_id=name, input_id=self._id_of(self._labels, label))
        return self._request(
            f"{name} of {label}",
            request,
            lambda call: ("done",),
            lambda world: self.rules.remove(world, name, label),
        )

    def update(self, label: str) -> Request:
        """Change a message that waits."""
        name = self._new("update")
        text = f"{self._stage.text(label, self._kinds[label])}\n{name}"
        request = calls.UpdateInputRequest(
            session=self.key, request_id=name, input_id=self._id_of(self._labels, label), content=text_content(text)
        )
        return self._request(
            f"{name} of {label}",
            request,
            lambda call: ("done",),
            lambda world: self.rules.update(world, name, label),
        )

    def now(self, label: str) -> Request:
        """Run a message that waits before all others."""
        name = self._new("now")
        request = calls.SendInputNowRequest(
            session=self.key, request_id=name, input_id=self._id_of(self._labels, label)
        )
        return self._request(
            f"{name} of {label}",
            request,
            lambda call: self._sent(label, call.response),
            lambda world: self.rules.now(world, name, label),
        )

    def resume(self) -> Request:
        """Let the queue go on."""
        name = self._new("resume")
        request = calls.ResumeQueueRequest(session=self.key, request_id=name)
        return self._request(
            name,
            request,
            lambda call: self._resumed(call.response),
            lambda world: self.rules.resume(world, name),
        )

    def kill(self) -> Request:
        """Kill the session."""
        name = self._new("kill")
        request = calls.KillSessionRequest(session=self.key, request_id=name)
        return self._request(name, request, lambda call: ("done",), lambda world: self.rules.kill(world, name))

    def answer(self, label: str, decisions: Sequence[tuple[str, str]]) -> Request:
        """Answer questions of an execution, which were seen to be asked."""
        name = self._new("answer")
        request = calls.AnswerInteractionsRequest(
            session=self.key,
            request_id=name,
            answers=[
                sessions.InteractionAnswer(interaction_id=self._gates[label, gate], decision=_DECISIONS[decision])
                for gate, decision in decisions
            ],
            answered_by="ada",
        )
        return self._request(
            f"{name} to {label}: {', '.join(f'{gate} {decision}' for gate, decision in decisions)}",
            request,
            lambda call: ("done",),
            lambda world: self.rules.answer(world, name, label, decisions),
        )

    def _request(
        self,
        words: str,
        request: Message,
        read: Callable[[Call], Answer],
        op: Op,
    ) -> Request:
        def answer_of(call: Call) -> Answer:
            if call.response is not None:
                return read(call)
            if not call.answered:
                return _NOT_TOLD
            assert isinstance(call.error, HearthError)
            return ("refused", call.error.reason)

        return Request(words, lambda: self._caller.call(self.key, request), answer_of, op)

    # Making them

    async def do(self, *requests: Request, meanwhile: Callable[[], Awaitable[None]] | None = None) -> list[Answer]:
        """Make requests at the same time; `meanwhile` something else is done, after which some may be unanswered."""
        self.made += requests
        calling = [asyncio.ensure_future(request.call()) for request in requests]
        if meanwhile is not None:
            await meanwhile()
        made = await asyncio.gather(*calling)
        for call in made:
            await self._learn(call)
        answers = [request.read(call) for request, call in zip(requests, made, strict=True)]
        self.narrow(requests, answers)
        return answers

    def narrow(self, requests: Sequence[Request], answers: Sequence[Answer]) -> None:
        """Keep the worlds in which these requests are answered so, in whatever order they came."""
        told = [(one.op, found) for one, found in zip(requests, answers, strict=True) if found != _NOT_TOLD]
        untold = [one for one, found in zip(requests, answers, strict=True) if found == _NOT_TOLD]
        before = self.worlds
        self.rules.racing = len(requests) > 1 or bool(untold)
        for one in untold:
            before = not_done(before, one.op, self.rules)
        left = after(self.rules, before, *told)
        for one in untold:
            left = not_done(left, one.op, self.rules)
        words = " ‖ ".join(f"{one.words} → {_say(found)}" for one, found in zip(requests, answers, strict=True))
        self._keep(left, words)

    async def until_told(self, requests: Sequence[Request], answers: Sequence[Answer]) -> None:
        """Make those again of which no answer came."""
        for request, found in zip(requests, answers, strict=True):
            told = found
            while told == _NOT_TOLD:
                call = await request.call()
                await self._learn(call)
                told = request.read(call)
                if told == _NOT_TOLD:
                    await asyncio.sleep(0.05)
            if found == _NOT_TOLD:
                self.narrow([request], [told])

    def apply(self, words: str, op: Op) -> None:
        """Something that was done to the session from outside."""
        self._keep(after(self.rules, self.worlds, (op, ANY)), words)

    def crashed(self) -> None:
        """The pool that drove it has died, at some moment since the last answer."""
        self._keep(self.worlds | after(self.rules, self.worlds, (self.rules.crash, ANY)), "the pool died")

    async def rotate(self) -> None:
        """Another value of the credential that sessions of this project may bind."""
        value = uuid.uuid4().hex
        request = calls.PutCredentialRequest(
            project=self.key.project, request_id=value, name=CREDENTIAL, value=f"value {value}"
        )
        made = await self._caller.call(self.key, request)
        assert made.response is not None, made.error
        self._story.append(f"{CREDENTIAL} has another value")

    async def expire(self) -> None:
        """The time of what is asked is over. What was asked a moment before it, and what a moment after, is not known
        apart."""
        await self._stage.expire(self.key.session)
        op = self.rules.expire
        self._keep(self.worlds | after(self.rules, self.worlds, (op, ANY)), f"what {self.name} asks expires")

    def let_go(self, label: str) -> None:
        """Let a held message end."""
        self._stage.let_go(label)
        self.apply(f"let {label} go", lambda world: self.rules.let_go(world, label))

    def _keep(self, worlds: set[World], words: str) -> None:
        self._story.append(f"{words}   [{len(worlds)}]")
        if not worlds:
            possible = "\n".join(str(world) for world in list(self.rules.onward(self.worlds))[:8])
            raise AssertionError(f"{self.name}: this cannot be: {words}\npossible was:\n{possible}")
        self.worlds = worlds

    # Looking

    async def look(self) -> sessions.Session:
        """Compare what the session shows now: row, newest execution."""
        backend = self._stage.backend
        shown = await backend.session(self.key)
        label, outcome = await self._seen(shown.execution)
        row = _row(shown)
        self._keep(after(self.rules, self.worlds, (self.rules.shown, row)), f"{self.name} shows {_say(row)}")
        newest: Answer = (label, outcome)
        self._keep(after(self.rules, self.worlds, (self.rules.newest, newest)), f"{self.name} runs {_say(newest)}")
        return shown

    async def look_at_queue(self) -> None:
        """Compare the queue."""
        listed = await self._stage.backend.sessions.ListInputs(
            calls.ListInputsRequest(session=self.key, page_size=1_000), timeout=20
        )
        waiting: Answer = tuple(
            self._labels[one.input_id] for one in listed.inputs if one.state == sessions.INPUT_STATE_PENDING
        )
        self._keep(after(self.rules, self.worlds, (self.rules.waiting, waiting)), f"{self.name} queues {_say(waiting)}")

    async def look_at_gates(self) -> list[tuple[str, str]]:
        """Compare the questions of each execution; those that wait for an answer, as (execution, gate)."""
        listed = await self._stage.backend.sessions.ListInteractions(
            calls.ListInteractionsRequest(session=self.key, page_size=1_000), timeout=20
        )
        found: dict[str, list[tuple[str, str, str]]] = {}
        for one in listed.interactions:
            label = await self._label_of(one.execution_id)
            self._gates[label, one.request.tool_name] = one.interaction_id
            state = sessions.InteractionState.Name(one.state).removeprefix("INTERACTION_STATE_")
            decision = event_pb2.Decision.Name(one.decision).removeprefix("DECISION_")
            found.setdefault(label, []).append(
                (one.request.tool_name, state, "" if decision == "UNSPECIFIED" else decision)
            )
        for label, gates in found.items():
            answer: Answer = tuple(sorted(gates))
            self._keep(
                after(self.rules, self.worlds, (lambda world, label=label: self.rules.gates(world, label), answer)),  # type: ignore[misc]
                f"{label} asks {_say(answer)}",
            )
        return [(label, name) for label, gates in found.items() for name, state, _ in gates if state == "PENDING"]

    @property
    def open_gates(self) -> list[tuple[str, str]]:
        """Questions that were seen."""
        return list(self._gates)

    async def rest(self) -> None:
        """Wait until nothing moves by itself any more, and compare everything."""
        if not self.accepted:
            return
        began = time.monotonic()
        while True:
            shown = await self.look()
            execution = shown.execution
            running = execution.execution_id and execution.state != sessions.EXECUTION_STATE_TERMINAL
            if running and self._is_driven(execution.execution_id, self.crash_mark):
                self.worlds = {next(self.rules.driven(world))[1] for world in self.worlds}
            # What is quiet but shows something else may still come: an agent that starts slowly has not asked yet.
            quiet = {world for world in self.worlds if self.rules.quiet(world) and self._shows(world, shown)}
            waited = time.monotonic() - began
            if quiet == self.worlds or (quiet and waited > _UNSURE_SECONDS):
                break
            assert waited < REST_SECONDS, f"{self.name} does not come to rest: {self.worlds}"
            self._story.pop()
            self._story.pop()
            await asyncio.sleep(0.02)
        self._keep(distinct(quiet) if len(quiet) > CROWDED else quiet, f"{self.name} is at rest")
        await self.look_at_queue()
        await self.look_at_gates()
        for label, execution_id in {name: found for found, name in self._executions.items()}.items():
            await self._compare_execution(label, execution_id)
        for command_id, name in list(self._commands.items()):
            command = await self._stage.backend.command(self.key, command_id)
            told: Answer = (_outcome(command),)
            self._keep(
                after(self.rules, self.worlds, (lambda world, name=name: self.rules.command(world, name), told)),  # type: ignore[misc]
                f"{name} came to {_say(told)}",
            )

    def _shows(self, world: World, shown: sessions.Session) -> bool:
        return any(answer == _row(shown) for answer, _ in self.rules.shown(world))

    # Lines of the agents' journal that were there when the pool died last.
    crash_mark = 0

    def _is_driven(self, execution_id: str, mark: int) -> bool:
        return execution_id in self._stage.prompts_since(mark)

    async def _compare_execution(self, label: str, execution_id: str) -> None:
        execution = await self._stage.backend.execution(self.key, execution_id)
        told: Answer = (_ended(execution),)
        self._keep(
            after(self.rules, self.worlds, (lambda world: self.rules.execution(world, label), told)),
            f"{label} ended as {_say(told)}",
        )

    # Names

    async def _seen(self, execution: sessions.Execution) -> tuple[str, str]:
        if not execution.execution_id:
            return "", ""
        return await self._label(execution), _ended(execution)

    async def _learn(self, call: Call) -> None:
        """The names of what an answer tells of."""
        response = call.response
        if isinstance(response, calls.SendInputResponse):
            label = getattr(call.request, "request_id", "")
            self._labels[getattr(response, response.WhichOneof("result") or "").input_id] = label
        if response is not None:
            for execution in messages_in(response, sessions.Execution):
                await self._label(execution)
            for command in messages_in(response, sessions.Command):
                if command.execution_id:
                    await self._label_of(command.execution_id)

    async def _label(self, execution: sessions.Execution) -> str:
        label = self._executions.get(execution.execution_id)
        if label is None:
            if execution.source_execution_id:
                label = f"{await self._label_of(execution.source_execution_id)}+"
            else:
                label = self._labels.get(execution.input_id) or await self._label_in_log(execution.input_id)
            self._executions[execution.execution_id] = label
            self._epochs[label] = execution.epoch
        return label

    async def _label_of(self, execution_id: str) -> str:
        if execution_id in self._executions:
            return self._executions[execution_id]
        return await self._label(await self._stage.backend.execution(self.key, execution_id))

    async def _label_in_log(self, input_id: str) -> str:
        """The label of a message that runs although nobody was told that it was accepted."""
        found: list[str] = []

        async def told() -> bool:
            found[:] = [
                text_of(event.message_completed.content).splitlines()[0]
                for event in await self._stage.backend.events(self.key)
                if event.message_completed.message_id == input_id
            ]
            return bool(found)

        await quietly(told, seconds=REST_SECONDS, what=f"nobody says what {input_id} is")
        self._labels[input_id] = found[0]
        return found[0]

    def _note(self, label: str, execution: sessions.Execution) -> str:
        if execution.execution_id not in self._executions:
            self._executions[execution.execution_id] = label
            self._epochs[label] = execution.epoch
        return _ended(execution)

    def _sent(self, label: str, response: object) -> Answer:
        assert isinstance(response, (calls.SendInputResponse, calls.SendInputNowResponse))
        result = response.WhichOneof("result")
        assert result is not None
        input_id = getattr(response, result).input_id
        assert self._labels[input_id] == label, "two messages have one input"
        match result:
            case "started":
                others = response.resumed_input_ids if isinstance(response, calls.SendInputResponse) else ()
                resumed = tuple(self._labels[one] for one in others)
                return ("started", self._note(label, response.started.execution), resumed)
            case "queued":
                return ("queued", response.queued.rank)
            case "steered":
                command = response.steered.command
                return ("steered", *self._told_of("", command))
            case _:
                return ("removed",)

    def _resumed(self, response: object) -> Answer:
        assert isinstance(response, calls.ResumeQueueResponse)
        if not response.HasField("started"):
            return ("resumed", "")
        label = self._labels[response.started.input_id]
        self._note(label, response.started.execution)
        return ("resumed", label)

    def _told_of(self, name: str, command: sessions.Command) -> tuple[str, str]:
        target = self._executions.get(command.execution_id, command.execution_id)
        nothing_ran = command.outcome == sessions.COMMAND_OUTCOME_NOT_RUNNING and (
            command.created_at == command.settled_at
        )
        self._commands.setdefault(command.command_id, name if nothing_ran else cancel_of(target))
        return target, _outcome(command)


def _ended(execution: sessions.Execution) -> str:
    outcome = sessions.ExecutionOutcome.Name(execution.outcome).removeprefix("EXECUTION_OUTCOME_")
    return "" if outcome == "UNSPECIFIED" else outcome.lower()


def _outcome(command: sessions.Command) -> str:
    outcome = sessions.CommandOutcome.Name(command.outcome).removeprefix("COMMAND_OUTCOME_")
    return "" if outcome == "UNSPECIFIED" else outcome


def _row(shown: sessions.Session) -> Answer:
    return (shown.queued_inputs, shown.queue_paused, shown.open_interactions)


def _say(answer: Answer) -> str:
    return " ".join(str(part) for part in answer) or "nothing"
