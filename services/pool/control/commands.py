"""Stop and Kill: durable requests to end what runs.

A Stop is accepted in one transaction with all that follows from it at once: the execution is STOPPING, the queue is
paused, and an execution that no agent has seen ends by the outbox. What becomes of it is settled with the execution.
"""

from __future__ import annotations

import dataclasses
from typing import Final

from services.chassis import crashpoints, telemetry
from services.chassis.clock import Clock, Ids
from services.chassis.errors import HearthError
from services.pool.changing import Changing
from services.pool.control import admission, facts
from services.pool.control.cancels import Cancels
from services.pool.control.inputs import existing
from services.pool.metrics import Metrics
from services.pool.rows import (
    Command,
    CommandKind,
    CommandOutcome,
    CommandState,
    Execution,
    ExecutionState,
    Key,
    Outcome,
    View,
)
from services.pool.store import Changed, Store

crashpoint = crashpoints.declare("pool", "stop.committed")

# How long a delivery may take before another one may be tried, in seconds, and how often it is tried.
CLAIM_LEASE = 60.0
MAX_ATTEMPTS = 3
# How long nobody may be there to deliver a command before it is given up, in seconds.
FORSAKEN_AFTER = 90.0


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
    """The execution is to be stopped."""

    execution: Execution


@dataclasses.dataclass(frozen=True, slots=True)
class Unask:
    """Nothing runs, but a paused execution still asks people: it will not go on."""

    execution: Execution


def stop_decision(view: View, aim: Aim, parked: Execution | None = None) -> StopIt | Unask | NothingRuns | HearthError:
    """What a Stop does, or why it is refused: it never ends an execution that its sender cannot have meant. `parked` is
    the paused execution that still asks people, if one does."""
    current = view.active or parked
    if current is None:
        return NothingRuns()
    # By the epoch of its admission: a takeover raises the other one, and it is still what the sender saw.
    seen = current.admitted_epoch <= aim.seen_epoch
    if not (aim.execution_id == current.execution_id if aim.execution_id else seen):
        return admission.mismatch(current)
    return StopIt(current) if view.active is not None else Unask(current)


_BY_OUTCOME: Final = {
    Outcome.STOPPED: (CommandState.APPLIED, CommandOutcome.STOPPED),
    Outcome.LOST: (CommandState.OBSOLETE, CommandOutcome.LOST),
}


def late(command: Command, target: Execution | None, *, newer: bool) -> tuple[CommandState, CommandOutcome] | None:
    """How a command is settled that outlived its target, which the settlement of that should have closed with it; None
    when it is still to be delivered. `newer`: another execution runs by now, and is left alone."""
    if target is not None and target.state is not ExecutionState.TERMINAL:
        return None
    cancels = command.kind in {CommandKind.CANCEL, CommandKind.STEER}
    if target is not None and target.outcome in _BY_OUTCOME and (cancels or target.outcome is Outcome.LOST):
        return _BY_OUTCOME[target.outcome]
    return CommandState.OBSOLETE, CommandOutcome.SUPERSEDED if newer else CommandOutcome.NOT_RUNNING


def _kind(command: Command) -> str:
    return "steer" if command.kind is CommandKind.STEER else "stop"


class Commands:
    """The shell: each call is one transaction, and `changed` hears of each commit."""

    def __init__(
        self, store: Store, clock: Clock, ids: Ids, *, changed: Changed, metrics: Metrics | None = None
    ) -> None:
        self._metrics = metrics or Metrics()
        self._store = store
        self._clock = clock
        self._ids = ids
        self._cancels = Cancels(clock, ids)
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
            parked = await changing.parked() if view.active is None and view.open_gates else None
            decision = stop_decision(view, aim, parked)
            if isinstance(decision, HearthError):
                raise decision
            match decision:
                case StopIt(execution):
                    telemetry.link(execution.traceparent)
                    command = await self._stop(changing, execution)
                case Unask(execution):
                    telemetry.link(execution.traceparent)
                    # As after a Stop of what ran: what waits is not started by this.
                    changing.change(queue_paused=True)
                    await self._cancels.unask(changing, execution.execution_id, by="stop")
                    command = await self._nothing_to_stop(changing, execution)
                case NothingRuns():
                    named = await changing.execution(aim.execution_id) if aim.execution_id else None
                    command = await self._nothing_to_stop(changing, named)
            await changing.insert_request(request_id, "StopExecution", fingerprint, command_id=command.command_id)
        crashpoint("stop.committed")
        if command.outcome is not None:
            self._metrics.command("stop", command.outcome)
        self._changed(key)
        return command

    async def _nothing_to_stop(self, changing: Changing, target: Execution | None) -> Command:
        return await changing.insert_command(
            self._ids.new(),
            CommandKind.CANCEL,
            target.execution_id if target is not None else None,
            CommandState.OBSOLETE,
            CommandOutcome.NOT_RUNNING,
        )

    async def _stop(self, changing: Changing, execution: Execution) -> Command:
        # A plain Stop pauses the queue even where it only joins a cancel that is under way.
        changing.change(queue_paused=True)
        command = await changing.open_cancel(execution.execution_id)
        if command is None:
            return await self._cancels.ask(changing, execution)
        if command.kind is CommandKind.CANCEL and command.steer_input_id is None:
            return command
        # Who stops does not want what was to run instead either; it stays where it is in the queue.
        return await changing.unbind(command.command_id)

    async def settle_late(self, key: Key) -> None:
        """Settle the commands of a session that outlived what they are aimed at."""
        settled: list[tuple[Command, CommandOutcome]] = []
        async with self._store.changing(key) as changing:
            if changing is None:
                return
            active = (await changing.view()).active
            for command in await changing.open_commands():
                target = await changing.execution(command.execution_id) if command.execution_id is not None else None
                found = late(command, target, newer=active is not None)
                if found is not None and await changing.settle_command(command.command_id, *found):
                    settled.append((command, found[1]))
        for command, outcome in settled:
            self._metrics.command(_kind(command), outcome)

    async def give_up(self, key: Key, command_id: str) -> bool:
        """Settle a command as LOST that nobody is there to deliver; False when it was settled before. What waits for it
        stays in the queue."""
        async with self._store.changing(key) as changing:
            if changing is None:
                return False
            command = await changing.command(command_id)
            given_up = await changing.settle_command(command_id, CommandState.OBSOLETE, CommandOutcome.LOST)
        if given_up and command is not None:
            self._metrics.command(_kind(command), CommandOutcome.LOST)
        return given_up

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
        await self._cancels.unask(changing, None, by=reason)
        changing.tell(*(facts.input_removed(gone, reason, now) for gone in await changing.remove_inputs()))
