"""A cancel, as it is put into a transaction that locks the session: plain Stops and inputs that steer share it."""

from __future__ import annotations

from services.chassis.clock import Clock, Ids
from services.pool.changing import Changing
from services.pool.control import facts
from services.pool.control.closing import close_gates
from services.pool.rows import Command, CommandKind, CommandState, Execution, ExecutionState, Resolution


def unstarted(execution: Execution) -> bool:
    """Whether no agent has seen it and nothing ends it yet, so that the pool may end it alone."""
    return execution.state is ExecutionState.PENDING and execution.ending_event_id is None


class Cancels:
    """Asks executions to stop, one open cancel for each."""

    def __init__(self, clock: Clock, ids: Ids) -> None:
        self._clock = clock
        self._ids = ids

    async def ask(self, changing: Changing, execution: Execution, *, steer_input_id: str | None = None) -> Command:
        """Make a cancel of an execution that has none; it is STOPPING from here on. `steer_input_id`: the input that
        waits for it."""
        kind = CommandKind.CANCEL if steer_input_id is None else CommandKind.STEER
        command = await changing.insert_command(
            self._ids.new(), kind, execution.execution_id, CommandState.PENDING, None, steer_input_id=steer_input_id
        )
        if not unstarted(execution):
            await changing.stop(execution.execution_id)
            if execution.state is ExecutionState.WAITING:
                # From here on an answer is too late, and who gives one is told.
                await self.unask(changing, execution.execution_id, by="stop" if steer_input_id is None else "steer")
            return command
        fact = facts.stopped(
            execution.execution_id,
            execution.epoch,
            reason="user" if steer_input_id is None else "steer",
            command_id=command.command_id,
            at=self._clock.now(),
        )
        await changing.end_by_pool(
            execution.execution_id, ExecutionState.STOPPING, fact.event_id, epoch=execution.epoch
        )
        changing.tell(fact)
        # Nor does what was decided before go on with the next one: who stopped this may not want that any more.
        await self.unask(changing, None, by="stop" if steer_input_id is None else "steer")
        return command

    async def unask(self, changing: Changing, execution_id: str | None, *, by: str) -> None:
        """Close what an execution asks people, or (None) all that is asked in the session: it will not go on with an
        answer. `by` is `stop`, `steer`, `kill` or `delete`."""
        await close_gates(changing, execution_id, Resolution.CANCELLED, by=by, at=self._clock.now())

    async def steer(self, changing: Changing, execution: Execution, cancel: Command | None, input_id: str) -> Command:
        """The cancel that an input waits for: the open one, which gets bound to it, or a new one."""
        if cancel is None:
            return await self.ask(changing, execution, steer_input_id=input_id)
        return await changing.bind(cancel.command_id, input_id)
