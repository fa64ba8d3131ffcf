"""SessionService: requests checked and passed on, results put into messages, nothing else."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import ExitStack
from datetime import UTC, datetime
from typing import Any, TypeVar

from opentelemetry import trace

from hearth.session.v1 import session_pb2 as sessions
from hearth.session.v1 import session_service_pb2 as calls
from hearth.session.v1 import session_service_pb2_grpc
from services.chassis import fields, telemetry
from services.chassis.clock import Clock
from services.chassis.errors import HearthError, NotFound, invalid
from services.chassis.interceptors import Context
from services.pool import messages, requests
from services.pool.attachments import Attachment, NewAttachment, Uploads, check_description
from services.pool.control import admission
from services.pool.control.commands import Commands
from services.pool.control.inputs import Inputs, NewInput, session_not_found
from services.pool.control.interactions import Interactions, NewAnswers
from services.pool.credentials_store import Credentials
from services.pool.removal import Removal
from services.pool.requests import Known, fingerprint, key_of, project_of
from services.pool.rows import Key
from services.pool.store import Shown, Store
from services.pool.warm.fingerprints import expectation

_PAGE = 100
_MOST = 1_000

_T = TypeVar("_T")


class SessionService(session_service_pb2_grpc.SessionServiceServicer):
    """What backends call. `closed` says why nothing new is accepted any more; None while it is."""

    def __init__(
        self,
        *,
        store: Store,
        inputs: Inputs,
        commands: Commands,
        interactions: Interactions,
        credentials: Credentials,
        removal: Removal,
        clock: Clock,
        known: Known,
        closed: Callable[[], HearthError | None],
    ) -> None:
        self._store = store
        self._inputs = inputs
        self._commands = commands
        self._interactions = interactions
        self._credentials = credentials
        self._uploads = Uploads(clock)
        self._removal = removal
        self._clock = clock
        self._known = known
        self._closed = closed

    # Mutations

    async def SendInput(self, request: calls.SendInputRequest, context: Context) -> calls.SendInputResponse:
        """Accept a message."""
        received_at = self._clock.monotonic()
        key = key_of(request.session)
        request_id = fields.request_id(request.request_id)
        requests.check_content("content", request.content)
        if request.HasField("spec"):
            requests.check_spec(request.spec, self._known)
        expected = None
        if request.HasField("expected_transcript"):
            requests.check_transcript(request.expected_transcript)
            expected = expectation(request.expected_transcript)
        self._refuse_when_closed()
        new = NewInput(
            key,
            request_id,
            fingerprint(request),
            request.content,
            request.spec if request.HasField("spec") else None,
            expected,
            requests.on_busy_of(request.on_busy),
            telemetry.inject(),
            received_at,
            requests.steers_of(request),
        )
        answer = messages.sent(await to_its_end(self._inputs.send(new)))
        span = trace.get_current_span()
        span.set_attribute("hearth.project", key.project)
        span.set_attribute("hearth.session", key.session)
        if answer.HasField("started"):
            # Its trace is found by this while the turn runs, whose own span comes last.
            span.set_attribute("hearth.execution", answer.started.execution.execution_id)
        return answer

    async def StopExecution(self, request: calls.StopExecutionRequest, context: Context) -> calls.StopExecutionResponse:
        """Accept a Stop."""
        key = key_of(request.session)
        request_id = fields.request_id(request.request_id)
        aim = requests.aim_of(request)
        command = await to_its_end(self._commands.stop(key, request_id, fingerprint(request), aim))
        return calls.StopExecutionResponse(command=messages.command(command))

    async def KillSession(self, request: calls.KillSessionRequest, context: Context) -> calls.KillSessionResponse:
        """End whatever runs and delete the sandbox."""
        key = key_of(request.session)
        request_id = fields.request_id(request.request_id)
        await to_its_end(self._removal.kill(key, request_id, fingerprint(request)))
        return calls.KillSessionResponse(session=messages.session(await self._shown(key)))

    async def DeleteSession(self, request: calls.DeleteSessionRequest, context: Context) -> calls.DeleteSessionResponse:
        """Delete a session for good."""
        key = key_of(request.session)
        fields.request_id(request.request_id)
        await to_its_end(self._removal.delete(key))
        return calls.DeleteSessionResponse()

    async def UpdateInput(self, request: calls.UpdateInputRequest, context: Context) -> calls.UpdateInputResponse:
        """Replace the content of an input that waits."""
        key = key_of(request.session)
        request_id = fields.request_id(request.request_id)
        input_id = fields.uuid_text("input_id", request.input_id)
        requests.check_content("content", request.content)
        row = await to_its_end(self._inputs.update(key, request_id, fingerprint(request), input_id, request.content))
        return calls.UpdateInputResponse(input=messages.input_(row))

    async def RemoveInput(self, request: calls.RemoveInputRequest, context: Context) -> calls.RemoveInputResponse:
        """Take an input out of the queue."""
        key = key_of(request.session)
        request_id = fields.request_id(request.request_id)
        input_id = fields.uuid_text("input_id", request.input_id)
        row = await to_its_end(self._inputs.remove(key, request_id, fingerprint(request), input_id))
        return calls.RemoveInputResponse(input=messages.input_(row))

    async def SendInputNow(self, request: calls.SendInputNowRequest, context: Context) -> calls.SendInputNowResponse:
        """Run an input that waits before all others."""
        key = key_of(request.session)
        request_id = fields.request_id(request.request_id)
        input_id = fields.uuid_text("input_id", request.input_id)
        meant = fields.uuid_text("execution_id", request.execution_id) if request.execution_id else ""
        self._refuse_when_closed()
        sent = await to_its_end(self._inputs.send_now(key, request_id, fingerprint(request), input_id, meant))
        return messages.sent_now(sent)

    async def ResumeQueue(self, request: calls.ResumeQueueRequest, context: Context) -> calls.ResumeQueueResponse:
        """Let a paused queue go on."""
        key = key_of(request.session)
        request_id = fields.request_id(request.request_id)
        self._refuse_when_closed()
        sent = await to_its_end(self._inputs.resume(key, request_id, fingerprint(request)))
        started = sent is not None and sent.execution is not None
        return calls.ResumeQueueResponse(started=messages.started(sent) if started and sent is not None else None)

    async def AnswerInteractions(
        self, request: calls.AnswerInteractionsRequest, context: Context
    ) -> calls.AnswerInteractionsResponse:
        """Accept answers of people."""
        new = NewAnswers(
            key_of(request.session),
            fields.request_id(request.request_id),
            fingerprint(request),
            requests.answers_of(request.answers),
            requests.name_of_caller(request.answered_by),
            telemetry.inject(),
        )
        return messages.answered(await to_its_end(self._interactions.answer(new)))

    async def PutAttachment(
        self, request_iterator: AsyncIterator[calls.PutAttachmentRequest], context: Context
    ) -> calls.PutAttachmentResponse:
        """Keep a file for messages."""
        stream = self._uploads.paced(request_iterator)
        description = await requests.description_of(stream)
        key = key_of(description.session)
        check_description(description)
        self._refuse_when_closed()
        with ExitStack() as held:
            new = NewAttachment(
                key,
                description.request_id,
                fingerprint(description),
                description.name,
                description.media_type,
                bytes.fromhex(description.digest),
                await self._uploads.receive(description, stream, held),
            )
            storing = self._store_upload(new, held.pop_all())
        attachment = await to_its_end(storing)
        return calls.PutAttachmentResponse(attachment=attachment.part())

    async def _store_upload(self, new: NewAttachment, held: ExitStack) -> Attachment:
        with held:
            return await self._inputs.attach(new)

    async def PutCredential(self, request: calls.PutCredentialRequest, context: Context) -> calls.PutCredentialResponse:
        """Store a credential, sealed."""
        project = project_of(request.project)
        request_id = fields.request_id(request.request_id)
        name = requests.credential_name("name", request.name)
        value = requests.credential_value(request.value)
        expires_at = requests.moment("expires_at", request, "expires_at")
        stored = await to_its_end(self._credentials.put(project, request_id, name, value, expires_at))
        credential = messages.credential(stored) if stored is not None else sessions.Credential(name=name)
        return calls.PutCredentialResponse(credential=credential)

    async def DeleteCredential(
        self, request: calls.DeleteCredentialRequest, context: Context
    ) -> calls.DeleteCredentialResponse:
        """Forget a credential."""
        project = project_of(request.project)
        request_id = fields.request_id(request.request_id)
        name = requests.credential_name("name", request.name)
        await to_its_end(self._credentials.delete(project, request_id, name))
        return calls.DeleteCredentialResponse()

    # Reads

    async def GetSession(self, request: calls.GetSessionRequest, context: Context) -> calls.GetSessionResponse:
        """One session."""
        shown = await self._shown(key_of(request.session))
        return calls.GetSessionResponse(session=messages.session(shown))

    async def ListSessions(self, request: calls.ListSessionsRequest, context: Context) -> calls.ListSessionsResponse:
        """Sessions of a project."""
        project = project_of(request.project)
        size = fields.page_size(request.page_size, default=_PAGE, maximum=_MOST)
        token = requests.page_token(request.page_token, str, str)
        after = (_moment(token[0]), token[1]) if token is not None else None
        found = await self._store.shown_sessions(project, after, size + 1)
        response = calls.ListSessionsResponse(sessions=[messages.session(shown) for shown in found[:size]])
        if len(found) > size:
            last = found[size - 1].session
            response.next_page_token = requests.next_page_token(last.updated_at.isoformat(), last.key.session)
        return response

    async def GetExecution(self, request: calls.GetExecutionRequest, context: Context) -> calls.GetExecutionResponse:
        """One execution."""
        key = key_of(request.session)
        execution_id = fields.uuid_text("execution_id", request.execution_id)
        row = await self._store.execution(key, execution_id)
        if row is None:
            raise await self._missing(key, "execution", execution_id, "EXECUTION_NOT_FOUND")
        return calls.GetExecutionResponse(execution=messages.execution(row))

    async def GetCommand(self, request: calls.GetCommandRequest, context: Context) -> calls.GetCommandResponse:
        """One command."""
        key = key_of(request.session)
        command_id = fields.uuid_text("command_id", request.command_id)
        row = await self._store.command(key, command_id)
        if row is None:
            raise await self._missing(key, "command", command_id, "COMMAND_NOT_FOUND")
        return calls.GetCommandResponse(command=messages.command(row))

    async def ListInputs(self, request: calls.ListInputsRequest, context: Context) -> calls.ListInputsResponse:
        """Inputs that wait, and those that have not reached their agent."""
        key = key_of(request.session)
        size = fields.page_size(request.page_size, default=_PAGE, maximum=_MOST)
        token = requests.page_token(request.page_token, int)
        offset = max(0, token[0]) if token is not None else 0
        await self._shown(key)
        waiting = await self._store.queue(key, offset=offset, limit=size + 1)
        begun = await self._store.unstarted_inputs(key) if offset == 0 else []
        response = calls.ListInputsResponse(inputs=[messages.input_(row) for row in [*begun, *waiting[:size]]])
        if len(waiting) > size:
            response.next_page_token = requests.next_page_token(offset + size)
        return response

    async def ListInteractions(
        self, request: calls.ListInteractionsRequest, context: Context
    ) -> calls.ListInteractionsResponse:
        """What agents have asked."""
        key = key_of(request.session)
        size = fields.page_size(request.page_size, default=_PAGE, maximum=_MOST)
        token = requests.page_token(request.page_token, str, str)
        after = (_moment(token[0]), _page_id(token[1])) if token is not None else None
        await self._shown(key)
        found = await self._store.list_gates(key, pending_only=request.pending_only, after=after, limit=size + 1)
        response = calls.ListInteractionsResponse(interactions=[messages.interaction(row) for row in found[:size]])
        if len(found) > size:
            last = found[size - 1]
            response.next_page_token = requests.next_page_token(last.created_at.isoformat(), last.interaction_id)
        return response

    async def ListCredentials(
        self, request: calls.ListCredentialsRequest, context: Context
    ) -> calls.ListCredentialsResponse:
        """Credentials of a project, without their values."""
        project = project_of(request.project)
        size = fields.page_size(request.page_size, default=_PAGE, maximum=_MOST)
        token = requests.page_token(request.page_token, str)
        found = await self._credentials.listed(project, token[0] if token is not None else "", size + 1)
        response = calls.ListCredentialsResponse(credentials=[messages.credential(row) for row in found[:size]])
        if len(found) > size:
            response.next_page_token = requests.next_page_token(found[size - 1].name)
        return response

    def _refuse_when_closed(self) -> None:
        error = self._closed()
        if error is not None:
            raise error

    async def _shown(self, key: Key) -> Shown:
        shown = await self._store.shown_session(key)
        if shown is None:
            raise session_not_found(key)
        if shown.session.deleted_at is not None:
            raise admission.deleted(shown.session)
        return shown

    async def _missing(self, key: Key, kind: str, found_id: str, reason: str) -> HearthError:
        await self._shown(key)
        return NotFound(f"no such {kind} in this session", reason=reason, resource=(kind, found_id, ""))


async def to_its_end(work: Coroutine[Any, Any, _T]) -> _T:
    """The result of `work`, which goes on to its end when the call that waits for it is cancelled: a change that was
    begun is never left half done."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(task)


def _moment(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text).astimezone(UTC)
    except (ValueError, OverflowError):
        raise _wrong_token() from None


def _page_id(text: str) -> str:
    try:
        return fields.uuid_text("page_token", text)
    except HearthError:
        raise _wrong_token() from None


def _wrong_token() -> HearthError:
    return invalid("page_token", "must be a next_page_token of this call, or empty")
