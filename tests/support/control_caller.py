"""Calls to a pool that are kept, with what it shows and what is stored in the end, for the checkers of sessions."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import Message

from hearth.history.v1 import history_service_pb2
from hearth.session.v1 import session_service_pb2 as calls
from hearth.types.v1 import session_pb2
from services.chassis.errors import HearthError, from_rpc_error
from tests.contract.pool.house import Backend
from tests.support.control_recording import Call, ControlRecording, Rows
from tests.support.recording import Log, Ticks

# Longer than anything takes on a busy machine, shorter than what hangs.
_CALL_SECONDS = 30.0
_PASSING = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED})


class Caller:
    """Makes the calls of one play, and keeps them."""

    def __init__(self, backend: Callable[[], Backend], journal: Callable[[], list[dict[str, Any]]]) -> None:
        """`backend` gives the calls to the pool that serves now, `journal` what agents wrote down so far."""
        self._backend = backend
        self._journal = journal
        self.recording = ControlRecording()
        self._ticks = Ticks()
        self._journal_from = len(journal())

    async def call(self, key: session_pb2.SessionKey, request: Message) -> Call:
        """Make a call; it has its answer, or the error that came instead."""
        made = Call((key.project, key.session), request, self._ticks(), began_at=time.time())
        self.recording.calls.append(made)
        method = type(request).__name__.removesuffix("Request")
        stub: Callable[..., Awaitable[Message]] = getattr(self._backend().sessions, method)
        try:
            made.response = await stub(request, timeout=_CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            made.error = from_rpc_error(error)
            if error.code() in _PASSING:
                return made
        made.answered, made.answered_at = self._ticks(), time.time()
        return made

    async def look(self, key: session_pb2.SessionKey) -> None:
        """Read what the pool shows of a session and what the log has, into the recording."""
        backend, name = self._backend(), (key.project, key.session)
        rows = Rows(await backend.session(key))
        listed = await backend.sessions.ListInputs(calls.ListInputsRequest(session=key, page_size=1_000), timeout=20)
        rows.waiting.extend(listed.inputs)
        asked = await backend.sessions.ListInteractions(
            calls.ListInteractionsRequest(session=key, page_size=1_000), timeout=20
        )
        rows.interactions.update({one.interaction_id: one for one in asked.interactions})
        log = Log()
        async for chunk in backend.history.StreamEvents(
            history_service_pb2.StreamEventsRequest(session=key), timeout=20
        ):
            log.items.extend(chunk.events)
        for execution_id in {item.event.execution_id for item in log.items if item.event.execution_id}:
            rows.executions[execution_id] = await backend.execution(key, execution_id)
        for command_id in self._commands(name, log):
            rows.commands[command_id] = await backend.command(key, command_id)
        self.recording.rows[name], self.recording.logs[name] = rows, log

    def _commands(self, name: tuple[str, str], log: Log) -> set[str]:
        found = {item.event.execution_stopped.command_id for item in log.items}
        for made in self.recording.calls:
            response = made.response
            if made.session != name:
                continue
            if isinstance(response, calls.StopExecutionResponse):
                found.add(response.command.command_id)
            elif isinstance(response, (calls.SendInputResponse, calls.SendInputNowResponse)):
                found.add(response.steered.command.command_id)
        return found - {""}

    def take_journal(self, mine: Callable[[str], bool] = lambda _: True) -> None:
        """Take what agents wrote down since this was made into the recording, of executions that are `mine`."""
        recording = self.recording
        recording.prompts, recording.turns, recording.told, recording.ran = [], [], [], []
        recording.read_journal(self._journal()[self._journal_from :])
        recording.prompts = [one for one in recording.prompts if mine(one.execution_id)]
        recording.told = [one for one in recording.told if mine(one.execution_id)]
        recording.ran = [one for one in recording.ran if mine(one.execution_id)]


def refusal(call: Call) -> str:
    """The reason that a call was refused for; empty when nobody knows what became of it."""
    error = call.error
    return error.reason if isinstance(error, HearthError) and call.answered else ""
