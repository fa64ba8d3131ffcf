"""One transaction on one session: what may be changed in it, as named SQL. It decides nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from datetime import datetime

from services.chassis.postgres import Connection, Queries
from services.pool import records
from services.pool.attachments import Attachment, NewAttachment
from services.pool.control.executions import leading_to
from services.pool.gate_rows import GateRows
from services.pool.rows import (
    Command,
    CommandKind,
    CommandOutcome,
    CommandState,
    Execution,
    ExecutionState,
    Fact,
    Finished,
    Input,
    Key,
    OutboxRow,
    Outcome,
    Request,
    Session,
    View,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Closed:
    """An execution that was just closed. `waiting`: inputs wait in the session; `asked`: gates of it are open;
    `cancelled_for`: how long a cancel of it was open, in seconds, None without one; `steered` is the input that waited
    for that one, if any."""

    execution: Execution
    waiting: bool
    asked: bool
    cancelled_for: float | None = None
    steered: str | None = None


class Changing:
    """One transaction on one session, whose row is locked. `session` is the row as it will be written."""

    def __init__(self, connection: Connection, queries: Queries, session: Session) -> None:
        self._connection = connection
        self._queries = queries
        self._read = session
        self._facts: list[Fact] = []
        # The facts as they were written.
        self.told: list[OutboxRow] = []
        self.session = session
        self.gates = GateRows(connection, queries, session.key)

    @property
    def key(self) -> Key:
        """Whose transaction it is."""
        return self.session.key

    @property
    def facts(self) -> int:
        """How many facts this transaction tells."""
        return len(self._facts)

    def change(
        self,
        *,
        epoch: int | None = None,
        queue_paused: bool | None = None,
        spec: bytes | None = None,
        execution_id: str | None = None,
        deleted_at: datetime | None = None,
        holder: str | None = None,
    ) -> None:
        """Change columns of the session row; what is not given stays."""
        given = {
            "epoch": epoch,
            "queue_paused": queue_paused,
            "spec": spec,
            "execution_id": execution_id,
            "deleted_at": deleted_at,
            "holder": holder,
        }
        changes = {name: value for name, value in given.items() if value is not None}
        self.session = dataclasses.replace(self.session, **changes)  # type: ignore[arg-type]

    def ended(self, execution_id: str, finished: Finished | None) -> None:
        """Note the last execution that was settled, and who wrote the last finished turn."""
        self.session = dataclasses.replace(self.session, ended_execution_id=execution_id, finished=finished)

    def tell(self, *facts: Fact) -> None:
        """Add facts to the outbox, in order."""
        self._facts += facts

    async def view(self, request_id: str = "") -> View:
        """What else is known, read after the lock."""
        row = await self._connection.fetchrow(self._queries.view, *self.key, request_id)
        assert row is not None
        request = None
        if row["request_method"] is not None:
            request = Request(
                row["request_method"],
                row["request_fingerprint"],
                records.text(row["request_input_id"]),
                records.text(row["request_command_id"]),
                records.text(row["request_attachment_id"]),
            )
        active = records.execution(row) if row["execution_id"] is not None else None
        return View(request, active, row["queued"], row["open_gates"], row["carried"])

    async def execution(self, execution_id: str) -> Execution | None:
        """An execution of this session."""
        row = await self._connection.fetchrow(self._queries.execution, *self.key, execution_id)
        return records.execution(row) if row is not None else None

    async def insert_request(
        self,
        request_id: str,
        method: str,
        fingerprint: bytes,
        *,
        input_id: str | None = None,
        command_id: str | None = None,
        attachment_id: str | None = None,
    ) -> None:
        """Note what was accepted under a request id."""
        await self._connection.execute(
            self._queries.insert_request,
            *self.key,
            request_id,
            method,
            fingerprint,
            input_id,
            command_id,
            attachment_id,
        )

    async def attach(self, attachment_id: str, new: NewAttachment) -> None:
        """Keep a file for the messages of this session."""
        await self._connection.execute(
            self._queries.insert_attachment,
            attachment_id,
            *self.key,
            new.name,
            new.media_type,
            new.digest,
            new.content,
        )

    async def attachments(self, ids: Sequence[str]) -> dict[str, Attachment]:
        """Those of these attachments that this session has, by id."""
        if not ids:
            return {}
        rows = await self._connection.fetch(self._queries.attachments, *self.key, ids)
        return {str(row["attachment_id"]): records.attachment(row) for row in rows}

    async def credential_ends(self, names: Sequence[str]) -> dict[str, datetime | None]:
        """Those of these credentials that the project has, with when each ends."""
        if not names:
            return {}
        rows = await self._connection.fetch(self._queries.credentials_by_name, self.key.project, names)
        return {row["name"]: row["expires_at"] for row in rows}

    async def admit(
        self,
        *,
        request_id: str,
        fingerprint: bytes,
        input_id: str,
        execution_id: str | None,
        content: bytes,
        spec: bytes | None,
        expected_transcript: bytes | None,
        traceparent: str,
        driver: str | None = None,
        first: bool = False,
        steer_command_id: str | None = None,
    ) -> Execution | None:
        """Store a request with its input: promoted to a new execution at the session's epoch when one is named, else
        in the queue, at its end or `first`, where it may wait for a cancel. A `driver` has picked that execution up.
        Writes the session row and the facts too."""
        now = self._numbered()
        row = await self._connection.fetchrow(
            self._queries.admit,
            *self.key,
            request_id,
            fingerprint,
            input_id,
            execution_id,
            content,
            spec,
            expected_transcript,
            traceparent,
            now.epoch,
            driver,
            *self._columns_of_facts(),
            now.holder,
            now.queue_paused,
            now.spec,
            now.execution_id,
            now.outbox_number,
            first,
            steer_command_id,
        )
        self._written()
        return records.execution(row) if row is not None else None

    async def promote(self, input_id: str, execution_id: str) -> Execution:
        """Give an input that waits to a new execution at the session's epoch."""
        row = await self._connection.fetchrow(self._queries.promote, input_id, self.session.epoch, execution_id)
        assert row is not None, "the session row is locked and the input was just seen waiting"
        return records.execution(row)

    async def queue(self, *, offset: int = 0, limit: int = 1) -> list[Input]:
        """Inputs that wait, by rank."""
        rows = await self._connection.fetch(self._queries.queue, *self.key, offset, limit)
        return [records.input_(row) for row in rows]

    async def input(self, input_id: str) -> Input | None:
        """An input of this session."""
        row = await self._connection.fetchrow(self._queries.input, *self.key, input_id)
        return records.input_(row) if row is not None else None

    async def remove_inputs(self, input_id: str | None = None) -> list[str]:
        """Take one input out of the queue, or all of them; the ids of those that were waiting."""
        rows = await self._connection.fetch(self._queries.remove_inputs, *self.key, input_id)
        return [str(row["input_id"]) for row in rows]

    async def update_input(self, input_id: str, content: bytes) -> bool:
        """Replace the content of an input that waits; False when it does not wait."""
        return await self._connection.fetchval(self._queries.update_input, input_id, content) is not None

    async def settle(
        self, execution_id: str, outcome: Outcome, code: str, sequence: int, commands: CommandOutcome
    ) -> Closed | None:
        """Close an execution and its open commands, for which no input waits any more. None when it was closed
        before."""
        row = await self._connection.fetchrow(
            self._queries.settle, execution_id, outcome, code, sequence, str(commands)
        )
        if row is None:
            return None
        steered = records.text(row["steered"])
        return Closed(records.execution(row), row["waiting"], row["asked"], row["cancelled_for"], steered)

    async def end_by_pool(
        self, execution_id: str, state: ExecutionState, ending_event_id: str, *, epoch: int
    ) -> Execution | None:
        """Bind an execution to an ending of the outbox, written at `epoch`; None when it ends already."""
        row = await self._connection.fetchrow(self._queries.end_by_pool, execution_id, state, ending_event_id, epoch)
        return records.execution(row) if row is not None else None

    async def stop(self, execution_id: str) -> Execution | None:
        """Move an execution to STOPPING; None when it is no longer where a Stop can reach it."""
        row = await self._connection.fetchrow(self._queries.stop, execution_id, leading_to(ExecutionState.STOPPING))
        return records.execution(row) if row is not None else None

    async def raise_epoch(self, execution_id: str, *, driver: str | None = None) -> Execution | None:
        """Take an execution from its driver by the session's epoch, and give it to another one, or to nobody; None when
        it ended or is not below it."""
        row = await self._connection.fetchrow(self._queries.raise_epoch, execution_id, self.session.epoch, driver)
        return records.execution(row) if row is not None else None

    async def open_gates(self, execution_id: str) -> list[str]:
        """The interactions of an execution that are not closed."""
        rows = await self._connection.fetch(self._queries.open_gates, execution_id)
        return [str(row["interaction_id"]) for row in rows]

    async def insert_command(
        self,
        command_id: str,
        kind: CommandKind,
        execution_id: str | None,
        state: CommandState,
        outcome: CommandOutcome | None,
        *,
        steer_input_id: str | None = None,
    ) -> Command:
        """Store a command."""
        row = await self._connection.fetchrow(
            self._queries.insert_command, command_id, *self.key, kind, execution_id, state, outcome, steer_input_id
        )
        assert row is not None
        return records.command(row)

    async def bind(self, command_id: str, input_id: str) -> Command:
        """Let an input wait for an open cancel that nothing waits for."""
        row = await self._connection.fetchrow(self._queries.bind, command_id, input_id)
        assert row is not None, "the session row is locked and the cancel was just seen open"
        return records.command(row)

    async def unbind(self, command_id: str) -> Command:
        """Make a plain cancel of an open one; an input that waits for it waits in the queue as before."""
        row = await self._connection.fetchrow(self._queries.unbind, command_id)
        assert row is not None, "the session row is locked and the cancel was just seen open"
        return records.command(row)

    async def move_first(self, input_id: str, steer_command_id: str) -> None:
        """Put an input that waits before all others, for a cancel that is bound to it."""
        await self._connection.execute(self._queries.move_first, input_id, steer_command_id)

    async def open_commands(self) -> list[Command]:
        """The commands of this session that are not settled, oldest first."""
        rows = await self._connection.fetch(self._queries.open_commands, *self.key)
        return [records.command(row) for row in rows]

    async def settle_command(self, command_id: str, state: CommandState, outcome: CommandOutcome) -> bool:
        """Settle one command, for which no input waits any more; False when it was settled before."""
        found = await self._connection.fetchval(self._queries.settle_command, command_id, state, outcome)
        return found is not None

    async def parked(self) -> Execution | None:
        """The paused execution that still asks people; None when none does."""
        row = await self._connection.fetchrow(self._queries.parked, *self.key)
        return records.execution(row) if row is not None else None

    async def command(self, command_id: str) -> Command | None:
        """A command of this session."""
        row = await self._connection.fetchrow(self._queries.command, *self.key, command_id)
        return records.command(row) if row is not None else None

    async def open_cancel(self, execution_id: str) -> Command | None:
        """The cancel of an execution that is still open."""
        row = await self._connection.fetchrow(self._queries.open_cancel, execution_id)
        return records.command(row) if row is not None else None

    async def step(self, execution_id: str, ending_event_id: str | None, epoch: int) -> None:
        """Move an execution, and the ending that it is bound to, to a higher epoch; who drives it below that is out."""
        await self._connection.execute(self._queries.step, execution_id, ending_event_id, epoch)

    async def rewrite_fact(self, number: int, event_id: str, event: bytes) -> None:
        """Replace a fact in its place."""
        await self._connection.execute(self._queries.rewrite_fact, *self.key, number, event_id, event)

    async def refuse_fact(self, number: int, reason: str) -> None:
        """Mark a fact that history will never take."""
        await self._connection.execute(self._queries.refuse_fact, *self.key, number, reason)

    async def save(self) -> None:
        """Write the session row and the facts, if there is anything to write."""
        if not self._facts and self.session == self._read:
            return
        now = self._numbered()
        await self._connection.execute(
            self._queries.save_session,
            *self.key,
            now.epoch,
            now.holder,
            now.queue_paused,
            now.spec,
            now.execution_id,
            now.ended_execution_id,
            now.finished.agent if now.finished is not None else None,
            now.finished.session_id if now.finished is not None else None,
            *self._columns_of_facts(),
            now.outbox_number,
            now.deleted_at,
            now.finished.execution_id if now.finished is not None else None,
        )
        self._written()

    def _numbered(self) -> Session:
        """The row with the numbers of the facts that are added."""
        number = self.session.outbox_number + len(self._facts)
        self.session = dataclasses.replace(self.session, outbox_number=number)
        return self.session

    def _columns_of_facts(self) -> list[list[object]]:
        first = self.session.outbox_number - len(self._facts) + 1
        return [
            list(range(first, first + len(self._facts))),
            [fact.event_id for fact in self._facts],
            [fact.event for fact in self._facts],
            [fact.execution_id for fact in self._facts],
            [fact.transition for fact in self._facts],
        ]

    def _written(self) -> None:
        first = self.session.outbox_number - len(self._facts) + 1
        self.told += [
            OutboxRow(number, fact.event_id, fact.event, fact.execution_id, fact.transition)
            for number, fact in enumerate(self._facts, first)
        ]
        self._facts = []
        self._read = self.session
