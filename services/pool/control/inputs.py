"""Inputs: accepting a message of a user, and what its owner may do with it while it waits."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence

from hearth.session.v1 import session_pb2 as sessions
from hearth.types.v1 import content_pb2
from services.chassis import crashpoints
from services.chassis.clock import Clock, Ids
from services.chassis.errors import FailedPrecondition, HearthError, NotFound
from services.pool.attachments import Attachment, NewAttachment, named, resolved
from services.pool.changing import Changing
from services.pool.control import admission, facts
from services.pool.control.admission import OnBusy
from services.pool.control.cancels import Cancels
from services.pool.control.starts import Starts, content_bytes
from services.pool.credentials import bindings, refusal
from services.pool.rows import (
    Command,
    CommandKind,
    CommandOutcome,
    CommandState,
    Execution,
    Input,
    InputState,
    Key,
    View,
)
from services.pool.store import Changed, PickedUp, Store

crashpoint = crashpoints.declare("pool", "admit.committed", "steer.committed")


@dataclasses.dataclass(frozen=True, slots=True)
class NewInput:
    """A checked SendInput. `fingerprint` is that of the request without its id; `spec` and `expected_transcript` are
    None when they were not given; `received_at` is on the monotonic clock; `steers` is the execution that a STEER is
    to stop, empty if that is whichever runs."""

    key: Key
    request_id: str
    fingerprint: bytes
    content: Sequence[content_pb2.ContentPart]
    spec: sessions.SessionSpec | None
    expected_transcript: bytes | None
    on_busy: OnBusy
    traceparent: str
    received_at: float
    steers: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Sent:
    """What became of an input, as it stands now. `execution` is None while it waits, and when it was removed;
    `command` is the open cancel that it waits for, if any."""

    input_id: str
    state: InputState
    execution: Execution | None = None
    rank: int = 0
    resumed: Sequence[str] = ()
    command: Command | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class _Busy:
    """The first look found an execution under way, and nothing was stored."""

    execution: Execution


class Inputs:
    """The shell around the decisions of `admission`: each call is one transaction, and `changed` hears of each commit.

    `settle_ended` is asked about an execution that is in the way: it settles it if it has ended already, and says so.
    `driver` is who picks up here what nobody else holds, None when nobody does any more: the commit that admits an
    execution then also says who drives it.
    """

    def __init__(
        self,
        store: Store,
        starts: Starts,
        clock: Clock,
        ids: Ids,
        *,
        queue_cap: int,
        changed: Changed,
        settle_ended: Callable[[Key, str], Awaitable[bool]],
        driver: Callable[[], str | None] = lambda: None,
    ) -> None:
        self._store = store
        self._starts = starts
        self._clock = clock
        self._ids = ids
        self._cancels = Cancels(clock, ids)
        self._queue_cap = queue_cap
        self._changed = changed
        self._settle_ended = settle_ended
        self._driver = driver

    async def send(self, new: NewInput) -> Sent:
        """Accept an input, or answer what became of one that was accepted under this request id before."""
        sent = await self._admit(new, first_look=True)
        if isinstance(sent, _Busy):
            # Readers see an ending in the log before it is settled here; whoever answers it must not be told "busy".
            await self._settle_ended(new.key, sent.execution.execution_id)
            # What has started since cannot be meant by one that steers.
            new = dataclasses.replace(new, steers=new.steers or sent.execution.execution_id)
            sent = await self._admit(new, first_look=False)
        assert isinstance(sent, Sent)
        return sent

    async def _admit(self, new: NewInput, *, first_look: bool) -> Sent | _Busy:
        async with self._store.changing(new.key, make=True) as changing:
            assert changing is not None
            view = await changing.view(new.request_id)
            cancel = await self._open_cancel(changing, view) if new.on_busy is OnBusy.STEER else None
            decision = admission.send_input(
                changing.session,
                view,
                new.fingerprint,
                new.on_busy,
                queue_cap=self._queue_cap,
                cancel=cancel,
                meant=new.steers,
            )
            if isinstance(decision, admission.Repeat):
                assert decision.request.input_id is not None
                return await _present(changing, decision.request.input_id)
            if first_look and view.active is not None and not isinstance(decision, admission.Start):
                return _Busy(view.active)
            if isinstance(decision, admission.Refuse):
                raise decision.error
            await self._check_credentials(changing, new, decision)
            content = resolved("content", new.content, await changing.attachments(named(new.content)))
            new = dataclasses.replace(new, content=content)
            sent = await self._store_input(changing, new, decision)
            # What it carries on has to be read with it.
            picked = None if view.carried else _picked_up(changing, sent, new)
        crashpoint("admit.committed" if sent.command is None else "steer.committed")
        self._changed(new.key, admitted_at=new.received_at, picked=picked, facts=changing.told)
        return sent

    async def _check_credentials(
        self, changing: Changing, new: NewInput, decision: admission.Start | admission.Enqueue | admission.Steer
    ) -> None:
        """Refuse what could only fail when its turn starts. What waits is checked again then: all may have changed."""
        spec = new.spec
        # Behind others it runs under the spec that they leave, which is not known yet.
        next_one = not isinstance(decision, admission.Enqueue) or decision.rank == 1
        if spec is None and next_one and changing.session.spec:
            spec = sessions.SessionSpec.FromString(changing.session.spec)
        wanted = bindings(spec) if spec is not None else []
        if wanted:
            ends = await changing.credential_ends(sorted({one.credential for one in wanted}))
            refused = refusal(wanted, ends, self._clock.now())
            if refused is not None:
                raise refused

    async def _store_input(
        self, changing: Changing, new: NewInput, decision: admission.Start | admission.Enqueue | admission.Steer
    ) -> Sent:
        input_id = self._ids.new()
        command = None
        spec = new.spec.SerializeToString(deterministic=True) if new.spec is not None else None
        execution_id, driver, resumed = None, None, list[str]()
        if isinstance(decision, admission.Start):
            if decision.resumes:
                resumed = [waiting.input_id for waiting in await changing.queue(limit=self._queue_cap)]
            if decision.unasks:
                await self._unask(changing)
            execution_id = self._starts.prepare(changing, spec)
            driver = self._driver()
            if driver is not None and changing.session.holder in {None, driver}:
                changing.change(holder=driver)
            else:
                driver = None
            changing.tell(*self._starts.facts(changing, execution_id, input_id, new.content))
        else:
            steers = isinstance(decision, admission.Steer)
            # Before the cancel, whose ending may be told in this very transaction.
            changing.tell(facts.input_queued(input_id, new.content, self._clock.now(), steer=steers))
            if isinstance(decision, admission.Steer):
                command = await self._cancels.steer(changing, decision.execution, decision.cancel, input_id)
        execution = await changing.admit(
            request_id=new.request_id,
            fingerprint=new.fingerprint,
            input_id=input_id,
            execution_id=execution_id,
            content=content_bytes(new.content),
            spec=spec,
            expected_transcript=new.expected_transcript,
            traceparent=new.traceparent,
            driver=driver,
            first=command is not None or (isinstance(decision, admission.Enqueue) and decision.first),
            steer_command_id=command.command_id if command is not None else None,
        )
        if isinstance(decision, admission.Enqueue):
            return Sent(input_id, InputState.PENDING, rank=decision.rank)
        if command is not None:
            return Sent(input_id, InputState.PENDING, rank=1, command=command)
        assert execution is not None
        if new.on_busy is OnBusy.STEER:
            await self._steered_at_once(changing, execution, input_id)
        return Sent(input_id, InputState.PROMOTED, execution, resumed=resumed)

    async def _open_cancel(self, changing: Changing, view: View) -> Command | None:
        return await changing.open_cancel(view.active.execution_id) if view.active is not None else None

    async def _unask(self, changing: Changing) -> None:
        parked = await changing.parked()
        if parked is not None:
            await self._cancels.unask(changing, parked.execution_id, by="steer")

    async def _steered_at_once(self, changing: Changing, execution: Execution, input_id: str) -> Command:
        """The command of an input that found nothing to stop."""
        return await changing.insert_command(
            self._ids.new(),
            CommandKind.STEER,
            execution.execution_id,
            CommandState.APPLIED,
            CommandOutcome.STARTED,
            steer_input_id=input_id,
        )

    async def send_now(self, key: Key, request_id: str, fingerprint: bytes, input_id: str, meant: str = "") -> Sent:
        """Run an input that waits before all others, stopping what runs; `meant` is the execution that is to make way
        for it, empty if that is whichever runs."""
        sent = await self._send_now(key, request_id, fingerprint, input_id, meant, first_look=True)
        if isinstance(sent, _Busy):
            await self._settle_ended(key, sent.execution.execution_id)
            # What has started since was not meant.
            meant = meant or sent.execution.execution_id
            sent = await self._send_now(key, request_id, fingerprint, input_id, meant, first_look=False)
        assert isinstance(sent, Sent)
        return sent

    async def _send_now(
        self, key: Key, request_id: str, fingerprint: bytes, input_id: str, meant: str, *, first_look: bool
    ) -> Sent | _Busy:
        async with self._store.changing(key) as found:
            changing = existing(found, key)
            view = await changing.view(request_id)
            known = admission.repeated(changing.session, view, "SendInputNow", fingerprint)
            if isinstance(known, admission.Refuse):
                raise known.error
            if known is not None:
                return await _present(changing, input_id)
            waiting = _waiting(await changing.input(input_id), input_id, reserved=True)
            if first_look and view.active is not None:
                return _Busy(view.active)
            cancel = await self._open_cancel(changing, view)
            decision = admission.send_now(view, waiting, cancel, paused=changing.session.queue_paused, meant=meant)
            match decision:
                case admission.Refuse(error):
                    raise error
                case admission.Steering(command):
                    sent = Sent(input_id, InputState.PENDING, rank=waiting.rank, command=command)
                case admission.Steer(execution, cancel):
                    command = await self._cancels.steer(changing, execution, cancel, input_id)
                    await changing.move_first(input_id, command.command_id)
                    sent = Sent(input_id, InputState.PENDING, rank=1, command=command)
                case admission.Start(_, unasks):
                    if unasks:
                        await self._unask(changing)
                    execution = await self._starts.promote(changing, waiting)
                    command = await self._steered_at_once(changing, execution, input_id)
                    sent = Sent(input_id, InputState.PROMOTED, execution)
            await changing.insert_request(
                request_id, "SendInputNow", fingerprint, input_id=input_id, command_id=command.command_id
            )
        crashpoint("steer.committed")
        self._changed(key)
        return sent

    async def remove(self, key: Key, request_id: str, fingerprint: bytes, input_id: str) -> Input:
        """Take an input out of the queue; the input after it."""
        async with self._store.changing(key) as found:
            changing = existing(found, key)
            if not await self._repeated(changing, request_id, "RemoveInput", fingerprint):
                _waiting(await changing.input(input_id), input_id)
                await changing.remove_inputs(input_id)
                await changing.insert_request(request_id, "RemoveInput", fingerprint, input_id=input_id)
                changing.tell(facts.input_removed(input_id, "user", self._clock.now()))
            after = await changing.input(input_id)
        assert after is not None
        self._changed(key)
        return after

    async def update(
        self,
        key: Key,
        request_id: str,
        fingerprint: bytes,
        input_id: str,
        content: Sequence[content_pb2.ContentPart],
    ) -> Input:
        """Replace the content of an input that waits; the input after it."""
        async with self._store.changing(key) as found:
            changing = existing(found, key)
            if not await self._repeated(changing, request_id, "UpdateInput", fingerprint):
                _waiting(await changing.input(input_id), input_id)
                content = resolved("content", content, await changing.attachments(named(content)))
                await changing.update_input(input_id, content_bytes(content))
                await changing.insert_request(request_id, "UpdateInput", fingerprint, input_id=input_id)
                changing.tell(facts.input_updated(input_id, request_id, content, self._clock.now()))
            after = await changing.input(input_id)
        assert after is not None
        self._changed(key)
        return after

    async def resume(self, key: Key, request_id: str, fingerprint: bytes) -> Sent | None:
        """Let a paused queue go on; what was started by it, None when nothing was."""
        async with self._store.changing(key) as found:
            changing = existing(found, key)
            view = await changing.view(request_id)
            known = admission.repeated(changing.session, view, "ResumeQueue", fingerprint)
            if isinstance(known, admission.Refuse):
                raise known.error
            if known is not None:
                input_id = known.request.input_id
                return await _present(changing, input_id) if input_id is not None else None
            sent = None
            changing.change(queue_paused=False)
            if admission.resume_queue(view):
                head = (await changing.queue())[0]
                execution = await self._starts.promote(changing, head)
                sent = Sent(head.input_id, InputState.PROMOTED, execution)
            await changing.insert_request(
                request_id, "ResumeQueue", fingerprint, input_id=sent.input_id if sent is not None else None
            )
        self._changed(key)
        return sent

    async def attach(self, new: NewAttachment) -> Attachment:
        """Keep a file for the messages of a session, which is made if it does not exist."""
        async with self._store.changing(new.key, make=True) as changing:
            assert changing is not None
            known = admission.repeated(
                changing.session, await changing.view(new.request_id), "PutAttachment", new.fingerprint
            )
            if isinstance(known, admission.Refuse):
                raise known.error
            if known is not None:
                assert known.request.attachment_id is not None
                attachment_id = known.request.attachment_id
            else:
                attachment_id = self._ids.new()
                await changing.attach(attachment_id, new)
                await changing.insert_request(
                    new.request_id, "PutAttachment", new.fingerprint, attachment_id=attachment_id
                )
            (found,) = (await changing.attachments([attachment_id])).values()
        return found

    async def _repeated(self, changing: Changing, request_id: str, method: str, fingerprint: bytes) -> bool:
        known = admission.repeated(changing.session, await changing.view(request_id), method, fingerprint)
        if isinstance(known, admission.Refuse):
            raise known.error
        return known is not None


def existing(changing: Changing | None, key: Key) -> Changing:
    """The transaction on a session that exists; raises NotFound otherwise."""
    if changing is None:
        raise session_not_found(key)
    return changing


def session_not_found(key: Key) -> HearthError:
    """The answer about a session that was never made."""
    return NotFound(
        "no such session in this project; it is made by its first SendInput",
        reason="SESSION_NOT_FOUND",
        resource=("session", str(key), ""),
    )


async def _present(changing: Changing, input_id: str) -> Sent:
    found = await changing.input(input_id)
    assert found is not None, "a request names an input that is stored with it"
    execution = await changing.execution(found.execution_id) if found.execution_id is not None else None
    command = await changing.command(found.steer_command_id) if found.steer_command_id is not None else None
    return Sent(input_id, found.state, execution, found.rank, command=command)


def _picked_up(changing: Changing, sent: Sent, new: NewInput) -> PickedUp | None:
    """What the driver here starts from, if the execution was admitted as picked up."""
    if sent.execution is None or sent.execution.driver is None:
        return None
    session = changing.session
    return PickedUp(
        sent.execution,
        session.spec,
        session.ended_execution_id,
        session.finished,
        content_bytes(new.content),
        new.expected_transcript,
    )


def _waiting(found: Input | None, input_id: str, *, reserved: bool = False) -> Input:
    """An input that can be changed: one that waits, and not for a cancel that is under way for it unless `reserved`
    says that this does not matter."""
    resource = ("input", input_id, "")
    if found is None:
        raise NotFound("no such input in this session", reason="INPUT_NOT_FOUND", resource=resource)
    if found.state is not InputState.PENDING:
        what = "was removed" if found.state is InputState.REMOVED else "runs or ran already"
        raise FailedPrecondition(
            f"the input {what}; only one that waits can be changed",
            reason="INPUT_NOT_PENDING",
            metadata={"state": str(found.state)},
            resource=resource,
        )
    if found.steer_command_id is not None and not reserved:
        raise FailedPrecondition(
            "the input is about to run: what runs was asked to make way for it; a Stop takes that back",
            reason="INPUT_NOT_PENDING",
            metadata={"state": str(found.state), "command_id": found.steer_command_id},
            resource=resource,
        )
    return found
