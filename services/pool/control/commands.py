"""Stop and Kill: durable requests to end what runs.

A Stop is accepted in one transaction with all that follows from it at once: the execution is STOPPING, the queue is
paused, and an execution that no agent has seen ends by the outbox. What becomes of it is settled with the execution.
"""

from __future__ import annotations

import dataclasses

from services.chassis.clock import Clock, Ids
from services.chassis.errors import FailedPrecondition, HearthError
from services.pool.changing import Changing
from services.pool.control import admission, facts
from services.pool.control.inputs import existing
from services.pool.rows import (
    Command,
    CommandKind,
    CommandOutcome,
    CommandState,
    Execution,
    ExecutionState,
    Key,
    View,
)
from services.pool.store import Changed, Store

# How long a delivery may take before another one may be tried, in seconds.
CLAIM_LEASE = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Aim:
    """Which execution a Stop means: the one named, or whichever runs if the sender can have seen it."""

    execution_id: str = ""
    seen_epoch: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class NothingRuns:
    """There is nothing to stop."""


@dataclasses.dataclass(frozen=True, slots=True)
class StopIt:
    """The execution is to be stopped. `unstarted`: no agent has seen it, so the pool ends it alone."""

    execution: Execution
    unstarted: bool


def stop_decision(view: View, aim: Aim) -> StopIt | NothingRuns | HearthError:
    """What a Stop does, or why it is refused: it never ends an execution that its sender cannot have meant."""
    active = view.active
    if active is None:
        return NothingRuns()
    # By the epoch of its admission: a takeover raises the other one, and it is still what the sender saw.
    seen = active.admitted_epoch <= aim.seen_epoch
    if not (aim.execution_id == active.execution_id if aim.execution_id else seen):
        return FailedPrecondition(
            "another execution runs than the one meant; look at it and decide again",
            reason="EXECUTION_MISMATCH",
            metadata={"execution_id": active.execution_id, "epoch": str(active.epoch)},
        )
    return StopIt(active, unstarted=active.state is ExecutionState.PENDING and active.ending_event_id is None)


class Commands:
    """The shell: each call is one transaction, and `changed` hears of each commit."""

    def __init__(self, store: Store, clock: Clock, ids: Ids, *, changed: Changed) -> None:
        self._store = store
        self._clock = clock
        self._ids = ids
        self._changed = changed

    async def stop(self, key: Key, request_id: str, fingerprint: bytes, aim: Aim) -> Command:
        """Accept a Stop, or answer what became of one that was accepted under this request id before."""
        async with self._store.changing(key) as found:
            changing = existing(found, key)
            view = await changing.view(request_id)
            known = admission.repeated(changing.session, view, "StopExecution", fingerprint)
            if isinstance(known, admission.Refuse):
                raise known.error
            if known is not None:
                assert known.request.command_id is not None
                command = await changing.command(known.request.command_id)
                assert command is not None, "a request names a command that is stored with it"
                return command
            decision = stop_decision(view, aim)
            if isinstance(decision, HearthError):
                raise decision
            if isinstance(decision, NothingRuns):
                command = await self._nothing_to_stop(changing, aim)
            else:
                command = await self._stop(changing, decision)
            await changing.insert_request(request_id, "StopExecution", fingerprint, command_id=command.command_id)
        self._changed(key)
        return command

    async def _nothing_to_stop(self, changing: Changing, aim: Aim) -> Command:
        named = await changing.execution(aim.execution_id) if aim.execution_id else None
        return await changing.insert_command(
            self._ids.new(),
            CommandKind.CANCEL,
            named.execution_id if named is not None else None,
            CommandState.OBSOLETE,
            CommandOutcome.NOT_RUNNING,
        )

    async def _stop(self, changing: Changing, decision: StopIt) -> Command:
        execution = decision.execution
        # A plain Stop pauses the queue even where it only joins a cancel that is under way.
        changing.change(queue_paused=True)
        command = await changing.open_cancel(execution.execution_id)
        if command is not None:
            return command
        command = await changing.insert_command(
            self._ids.new(), CommandKind.CANCEL, execution.execution_id, CommandState.PENDING, None
        )
        if decision.unstarted:
            fact = facts.stopped(
                execution.execution_id,
                execution.epoch,
                reason="user",
                command_id=command.command_id,
                at=self._clock.now(),
            )
            await changing.end_by_pool(
                execution.execution_id, ExecutionState.STOPPING, fact.event_id, epoch=execution.epoch
            )
            changing.tell(fact)
        else:
            await changing.stop(execution.execution_id)
        return command

    async def kill(self, key: Key, request_id: str, fingerprint: bytes) -> int:
        """End whatever runs and empty the queue, under the next epoch, which it returns: every claim below it may be
        closed. A repeated one changes nothing."""
        async with self._store.changing(key) as found:
            changing = existing(found, key)
            view = await changing.view(request_id)
            known = admission.repeated(changing.session, view, "KillSession", fingerprint)
            if isinstance(known, admission.Refuse):
                raise known.error
            if known is None:
                await self.kill_in(changing, view, reason="kill")
                await changing.insert_request(request_id, "KillSession", fingerprint)
            epoch = changing.session.epoch
        self._changed(key)
        return epoch

    async def kill_in(self, changing: Changing, view: View, *, reason: str) -> None:
        """The changes of a kill, in a transaction that does more. `reason` is told of the inputs that are removed."""
        now = self._clock.now()
        changing.change(epoch=changing.session.epoch + 1)
        if view.active is not None and view.active.ending_event_id is None:
            fact = facts.stopped(
                view.active.execution_id,
                changing.session.epoch,
                reason="killed",
                command_id=None,
                at=now,
                incomplete="" if view.active.state is ExecutionState.PENDING else "the run was killed",
            )
            await changing.end_by_pool(
                view.active.execution_id, ExecutionState.STOPPING, fact.event_id, epoch=changing.session.epoch
            )
            changing.tell(fact)
        changing.tell(*(facts.input_removed(gone, reason, now) for gone in await changing.remove_inputs()))
