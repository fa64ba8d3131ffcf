"""What becomes of gates that nobody is to answer any more, and of an execution that was paused for them, inside of a
transaction that locks the session."""

from __future__ import annotations

from datetime import datetime

from services.pool.changing import Changing
from services.pool.control import facts, gates
from services.pool.control.starts import Starts
from services.pool.rows import Execution, Outcome, Resolution


async def close_gates(
    changing: Changing, execution_id: str | None, resolution: Resolution, *, by: str, at: datetime
) -> None:
    """Close what is open, of one execution or (None) of the whole session, and tell readers.

    `by` is who or what does: `stop`, `steer`, `kill`, `delete`, or empty for the end of its execution. What that means
    for the queue is the caller's business.
    """
    closed = await changing.gates.close(execution_id, resolution)
    changing.tell(*(facts.interaction_resolved(gate, by, at) for gate in closed))


async def follow(changing: Changing, starts: Starts, execution_id: str, *, traceparent: str = "") -> Execution | None:
    """What follows for an execution of which gates were answered or closed, or which was paused: whichever of these
    comes last does it. The continuation, if this has made it.

    While it is not paused, or somebody is still asked, nothing does. Then it goes on with the answers that there are;
    without any the queue is paused, as after a Stop.
    """
    execution = await changing.execution(execution_id)
    if execution is None or execution.outcome is not Outcome.PAUSED:
        return None
    match gates.after(*await changing.gates.counts(execution_id)):
        case gates.Follow.NOTHING:
            return None
        case gates.Follow.CONTINUE:
            return await starts.continue_(changing, execution_id, traceparent)
        case gates.Follow.PAUSE_QUEUE:
            if await changing.gates.continuation(execution_id) is None:
                changing.change(queue_paused=True)
            return None
