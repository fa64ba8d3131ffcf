"""One session on a stage of two replicas, and what its users do: every call is kept, and all of it is checked."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any, TypeVar

from google.protobuf.message import Message

from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import event_pb2
from tests.checkers import control
from tests.contract.pool.house import ENDINGS, key, summary, text_content
from tests.support.control_caller import Caller
from tests.support.control_recording import Call, ControlRecording
from tests.support.control_stage import CREDENTIAL, FIRST, SECOND, Stage, quietly

_M = TypeVar("_M", bound=Message)

ALLOWED, DENIED = event_pb2.DECISION_ALLOWED, event_pb2.DECISION_DENIED
# Two cold starts on a busy machine, after a dead replica was noticed.
_SECONDS = 60.0


class Act:
    """A session. The first replica is the one that something happens to; `at` says which of them is called."""

    def __init__(self, stage: Stage, name: str = "s") -> None:
        self.stage = stage
        self.key = key(name)
        self._at = FIRST
        self._caller = Caller(lambda: stage.of(self._at), stage.journal)

    @property
    def recording(self) -> ControlRecording:
        """What was asked and answered so far."""
        return self._caller.recording

    # Calls

    async def call(self, request: Message, *, at: str = FIRST) -> Call:
        """Ask something of one replica."""
        self._at = at
        return await self._caller.call(self.key, request)

    async def must(self, request: Message, answer: type[_M], *, at: str = FIRST) -> _M:
        """Ask something that is accepted."""
        made = await self.call(request, at=at)
        assert isinstance(made.response, answer), made.error
        return made.response

    def message(
        self,
        kind: str = "quick",
        *,
        label: str = "",
        on_busy: sessions.OnBusy.ValueType = sessions.ON_BUSY_QUEUE,
        spec: sessions.SessionSpec | None = None,
    ) -> calls.SendInputRequest:
        """A message; its request id is its label."""
        label = label or f"{kind}-{uuid.uuid4().hex[:12]}"
        return calls.SendInputRequest(
            session=self.key,
            request_id=label,
            content=text_content(self.stage.text(label, kind)),
            on_busy=on_busy,
            spec=spec,
        )

    def stop(self, execution_id: str, request_id: str = "") -> calls.StopExecutionRequest:
        """A Stop."""
        return calls.StopExecutionRequest(
            session=self.key, request_id=request_id or str(uuid.uuid4()), execution_id=execution_id
        )

    def answer(
        self, asked: Sequence[sessions.Interaction], *decisions: event_pb2.Decision.ValueType, request_id: str = ""
    ) -> calls.AnswerInteractionsRequest:
        """Answers to what was asked, in its order; the last decision counts for all that follow."""
        given = [*decisions, *[decisions[-1]] * len(asked)]
        return calls.AnswerInteractionsRequest(
            session=self.key,
            request_id=request_id or str(uuid.uuid4()),
            answered_by="ada",
            answers=[
                sessions.InteractionAnswer(interaction_id=one.interaction_id, decision=decision)
                for one, decision in zip(asked, given, strict=False)
            ],
        )

    def rotation(self) -> calls.PutCredentialRequest:
        """Another value of the credential that specs bind."""
        value = uuid.uuid4().hex
        return calls.PutCredentialRequest(
            project=self.key.project, request_id=value, name=CREDENTIAL, value=f"value {value}"
        )

    # Situations

    async def running(
        self, kind: str = "held", *, at: str = FIRST, spec: sessions.SessionSpec | None = None
    ) -> tuple[str, str]:
        """A turn that its agent is at: the label of its message, and its execution."""
        request = self.message(kind, spec=spec)
        sent = await self.must(request, calls.SendInputResponse, at=at)
        execution_id = sent.started.execution.execution_id
        await self.handed_over(execution_id)
        await self.is_in(execution_id, {sessions.EXECUTION_STATE_RUNNING, sessions.EXECUTION_STATE_WAITING})
        return request.request_id, execution_id

    async def asking(self, *, at: str = FIRST) -> tuple[str, list[sessions.Interaction]]:
        """A turn that waits for people: its execution, and what it asks."""
        _, execution_id = await self.running("asks", at=at)
        return execution_id, await self.asked(2)

    async def asked(self, number: int) -> list[sessions.Interaction]:
        """What is asked, once it is so much."""
        found: list[sessions.Interaction] = []

        async def all_asked() -> bool:
            request = calls.ListInteractionsRequest(session=self.key, pending_only=True)
            listed = await self.stage.of(SECOND).sessions.ListInteractions(request, timeout=20)
            found[:] = sorted(listed.interactions, key=lambda one: one.request.tool_name)
            return len(found) >= number

        await quietly(all_asked, seconds=_SECONDS, what=f"{number} are not asked")
        return found

    async def queued(self, *, at: str = FIRST) -> tuple[str, str]:
        """A message that waits: its label and input."""
        request = self.message()
        sent = await self.must(request, calls.SendInputResponse, at=at)
        assert sent.HasField("queued"), sent
        return request.request_id, sent.queued.input_id

    async def driver_of(self, execution_id: str) -> str:
        """The replica that drives an execution."""
        (row,) = await self.stage.ask("SELECT driver FROM pool.execution WHERE execution_id = $1", execution_id)
        holders = {await self.stage.holder_of(pool): pool for pool in self.stage.house.pools}
        return holders[str(row["driver"])]

    # Waiting

    async def handed_over(self, execution_id: str) -> None:
        """Return when the agent has the prompt."""

        async def there() -> bool:
            return execution_id in self.stage.prompts_since(0)

        await quietly(there, seconds=_SECONDS, what=f"the prompt of {execution_id} is not handed over")

    async def is_in(self, execution_id: str, states: set[sessions.ExecutionState.ValueType]) -> None:
        """Return when an execution is in one of these states."""

        async def so() -> bool:
            return (await self.stage.of(SECOND).execution(self.key, execution_id)).state in states

        await quietly(so, seconds=_SECONDS, what=f"{execution_id} does not get to {states}")

    async def ended(self, execution_id: str, *, at: str = SECOND) -> str:
        """How an execution ended, once it is settled: `completed`, `stopped` and so on."""
        execution = await self.stage.of(at).settled(self.key, execution_id, timeout=_SECONDS)
        return sessions.ExecutionOutcome.Name(execution.outcome).removeprefix("EXECUTION_OUTCOME_").lower()

    async def ending_in_log(self, execution_id: str) -> event_pb2.Event:
        """The ending of an execution, once it is in the log."""
        return await self.stage.of(SECOND).ending(self.key, execution_id, timeout=_SECONDS)

    async def how(self, execution_id: str) -> str:
        """Whether an execution that ended had an agent that was kept: `warm`, `restarted` or `cold`."""
        return summary(await self.ending_in_log(execution_id)).how

    async def first_execution_of(self, label: str) -> str:
        """The execution of a message of which nobody was told, by the same request sent again."""
        for made in self.recording.calls:
            request = made.request
            if isinstance(request, calls.SendInputRequest) and request.request_id == label:
                sent = await self.must(request, calls.SendInputResponse, at=SECOND)
                if sent.HasField("started"):
                    return sent.started.execution.execution_id
                return await self.started_later(getattr(sent, sent.WhichOneof("result") or "").input_id)
        raise AssertionError(f"{label} was never sent")

    async def started_later(self, input_id: str) -> str:
        """The execution of an input, once it has one."""
        found: list[str] = []

        async def started() -> bool:
            events = await self.stage.of(SECOND).events(self.key)
            found[:] = [e.execution_id for e in events if e.execution_started.input_id == input_id and e.execution_id]
            return bool(found)

        await quietly(started, seconds=_SECONDS, what=f"{input_id} is not started")
        return found[0]

    async def continuation(self, source: str) -> str:
        """The execution that goes on with another, once there is one."""
        found: list[str] = []

        async def started() -> bool:
            events = await self.stage.of(SECOND).events(self.key)
            found[:] = [e.execution_id for e in events if e.execution_started.source_execution_id == source]
            return bool(found)

        await quietly(started, seconds=_SECONDS, what=f"{source} is not gone on with")
        return found[0]

    def lines(self, execution_id: str) -> list[dict[str, Any]]:
        """What agents wrote down while they had the prompt of an execution."""
        found: list[dict[str, Any]] = []
        running: dict[tuple[Any, Any], str] = {}
        for line in self.stage.journal():
            who = (line["pid"], line.get("session"))
            if line["event"] == "prompt":
                running[who] = str(line["message_id"])
            if running.get(who) == execution_id:
                found.append(line)
        return found

    async def settled_by_others(self) -> None:
        """Return when nothing runs and readers were told everything, as far as the rows know."""

        async def so() -> bool:
            (row,) = await self.stage.ask(
                "SELECT (SELECT count(*) FROM pool.execution WHERE session = $1 AND state <> 'TERMINAL')"
                " + (SELECT count(*) FROM pool.outbox WHERE session = $1 AND refused IS NULL) AS open",
                self.key.session,
            )
            return not row["open"]

        await quietly(so, seconds=_SECONDS, what=f"{self.key.session} is not settled")

    # The end

    async def goes_on(self, *, at: str = SECOND, spec: sessions.SessionSpec | None = None) -> None:
        """The next message is answered."""
        sent = await self.must(self.message(spec=spec), calls.SendInputResponse, at=at)
        assert sent.HasField("started"), sent
        assert await self.ended(sent.started.execution.execution_id) == "completed"

    async def check(self) -> list[event_pb2.Event]:
        """Nothing moves any more: everything that was promised holds. The log."""
        # What was accepted last may be on its way to the log still.
        await self.settled_by_others()
        self._at = SECOND
        await self._caller.look(self.key)
        self._caller.take_journal(self._is_mine)
        self.recording.settled = True
        events = self.recording.events((self.key.project, self.key.session))
        try:
            control.check(self.recording)
        except AssertionError as error:
            raise AssertionError(f"{error}\nin the log:\n{_told(events)}") from error
        assert [event.type for event in events if event.type == "history.incomplete"] == []
        return events

    def _is_mine(self, execution_id: str) -> bool:
        return execution_id in {
            event.execution_id for event in self.recording.events((self.key.project, self.key.session))
        }

    async def kill(self) -> None:
        """Leave nothing that runs."""
        await self.must(
            calls.KillSessionRequest(session=self.key, request_id=str(uuid.uuid4())),
            calls.KillSessionResponse,
            at=SECOND,
        )


def _told(events: Sequence[event_pb2.Event]) -> str:
    return "\n".join(
        f"{number} {event.type} {event.execution_id} {event.entity_id} {event.epoch}"
        for number, event in enumerate(events, 1)
    )


def endings(events: Sequence[event_pb2.Event]) -> dict[str, event_pb2.Event]:
    """The ending of each execution."""
    return {event.execution_id: event for event in events if event.WhichOneof("body") in ENDINGS}
