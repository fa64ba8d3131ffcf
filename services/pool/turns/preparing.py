"""From an execution to an agent that can be asked: the sandbox, and the live session in it or a new one.

A live session is used only where everything about it is known to fit. Whatever does not fit closes it first, and costs
a cold start, never the turn.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TypeVar

from hearth.sandbox.v1 import sandbox_pb2
from hearth.secret import hidden
from hearth.session.v1 import session_pb2 as sessions
from hearth.types.v1 import content_pb2, event_pb2
from services.chassis import crashpoints, telemetry
from services.chassis.errors import FailedPrecondition, HearthError
from services.pool import attachments, credentials
from services.pool.control.starts import content_of
from services.pool.credentials import NOTHING, Given
from services.pool.harness.port import HarnessError, HarnessSession, McpServer, OpenRequest
from services.pool.harness.updates import attachment_path
from services.pool.rows import Claim, Gate, GateState
from services.pool.store import PickedUp
from services.pool.turns import continuing, leftovers
from services.pool.turns.persistence import until_it_lands
from services.pool.turns.room import Fenced, TurnFailed, TurnRoom
from services.pool.turns.sandboxes import Acquired
from services.pool.turns.stages import Stage, Stages
from services.pool.warm import fingerprints
from services.pool.warm.entries import Entry, Live
from services.pool.warm.transcripts import Transcript

logger = logging.getLogger(__name__)
crashpoint = crashpoints.declare("pool", "prepare.checked_out", "prepare.acquired", "prepare.opened")

_LOG_RETRY_SECONDS = 1.0
# Events that count for the identity of a conversation.
_COUNTED = frozenset({"message_completed", "tool_completed"})

_T = TypeVar("_T")

# What says nothing about the session that was to be loaded: opening a new one instead would only fail again.
_NOT_OF_THE_SESSION = frozenset({"AGENT_START_FAILED", "AGENT_OPEN_TIMEOUT", "DAEMON_UNREACHABLE"})


@dataclasses.dataclass(frozen=True, slots=True)
class Misfit:
    """Why a live session cannot take the turn, in one word, and why its sandbox is given back."""

    word: str
    reason: sandbox_pb2.ReleaseReason.ValueType


_CONFIG = Misfit("config", sandbox_pb2.RELEASE_REASON_SESSION_INCOMPATIBLE)
_CONTINUITY = Misfit("continuity", sandbox_pb2.RELEASE_REASON_CONTINUITY_INVALID)
_HISTORY = Misfit("history", sandbox_pb2.RELEASE_REASON_CONTINUITY_INVALID)


def _stale(why: str) -> Misfit:
    # What the agent was started with stays in its sandbox, so that goes too.
    return Misfit(why, sandbox_pb2.RELEASE_REASON_RUNTIME_INCOMPATIBLE)


@dataclasses.dataclass(frozen=True, slots=True)
class Ready:
    """An agent that can be asked. `how` is `warm`, `restarted` or `cold`; `transcript` is for it to read first;
    `workspace` is the directory in its sandbox in which it works."""

    entry: Entry
    live: Live
    how: str
    transcript: str
    workspace: str

    @property
    def continued(self) -> bool:
        """Whether it is a session that was kept."""
        return self.how == "warm"


class Preparation:
    """Gets the agent of one execution ready. `entry` is the seat in use, for whoever has to clean up after it."""

    def __init__(self, room: TurnRoom, picked: PickedUp, stages: Stages, lost: Callable[[Entry, bool], None]) -> None:
        """`lost(entry, fenced)` is called when the claim of its sandbox does not stand any more."""
        self._room = room
        self._lost = lost
        self._picked = picked
        self._stages = stages
        self._key = picked.execution.key
        self.spec = sessions.SessionSpec.FromString(picked.spec)
        self.agent = self.spec.agent or room.settings.default_agent
        self.provider = self.spec.sandbox.provider or room.settings.default_provider
        self.sandbox_id = ""
        self.entry: Entry | None = None
        # Of what was passed on before: that of which the log does not say what came of it.
        self.uncertain: Sequence[Gate] = ()
        # An agent is being opened, or could not be, in a sandbox that was kept.
        self.opening_kept = False
        self._gives_up_at = room.clock.monotonic() + room.settings.history_patience
        self._content = content_of(picked.content)
        self._spec_digest = hashlib.sha256(picked.spec).digest()
        self._given: Given = NOTHING
        self._turn_limit = room.settings.limits.with_spec(self.spec.limits).turn
        known = picked.finished
        self._load = known if known is not None and known.agent == self.agent else None

    async def prepare(self, attempt: int) -> Ready:
        """An agent that can be asked, under the claim of this attempt (from 1).

        Raises `TurnFailed`, and `Fenced` when a higher claim exists.
        """
        claim = Claim(self._picked.execution.epoch, attempt)
        if attempt == 1:
            await self._begin()
            self.uncertain = await self._uncertain()
        if self.entry is None:
            self.entry = await self._room.entries.reserve(self._key, claim)
        entry = self.entry
        # Before the call: whoever cleans up after a call that was cut off closes this claim.
        entry.claim = claim
        acquired = await self._acquire(entry, claim)
        crashpoint("prepare.acquired")
        live = entry.live
        if live is not None:
            same = acquired.how == "attached" and live.sandbox_id == acquired.sandbox_id
            if same and live.token == acquired.endpoint.token:
                with self._stage("open", long=False) as stage:
                    stage.how = "continue"
                live.given = self._given
                # The same daemon, whose address at the provider may have changed since.
                live.harness.reach(acquired.endpoint)
                return Ready(entry, live, "warm", "", acquired.workspace)
            # Another daemon, or another sandbox: what we knew is gone, and nothing of it may be touched.
            self._room.metrics.missed("instance")
            entry.live = None
            entry.turns = 0
            with suppress(HarnessError):
                await live.harness.park()
        return await self._open(entry, acquired)

    async def bring_files(self, ready: Ready) -> None:
        """Write the attachments of the message into the workspace, where the prompt says that they are.

        Raises `HarnessError` when the sandbox does not take them, and `TurnFailed`.
        """
        for attachment_id in attachments.named(self._content):
            part = next(
                part.attachment
                for part in self._content
                if part.WhichOneof("part") == "attachment" and part.attachment.attachment_id == attachment_id
            )
            content = await until_it_lands(
                self._room.clock,
                self._key,
                "attachment",
                lambda wanted=attachment_id: self._room.store.attachment_content(self._key, wanted),  # type: ignore[misc]
            )
            if content is None:
                raise TurnFailed("ATTACHMENT_NOT_FOUND", f"attachment {attachment_id} is not there", retryable=False)
            await ready.live.harness.write_file(attachment_path(part, ready.workspace), content)

    async def _begin(self) -> None:
        """Take the entry that is kept, if it fits, and what the agent is to be given: without that nothing starts."""
        entry = self.entry = self._room.entries.checkout(self._key)
        if entry is None:
            self._room.metrics.missed("not-kept" if self._picked.ended_execution_id else "first-turn")
        else:
            crashpoint("prepare.checked_out")
        try:
            self._given = await self._what_it_is_given()
        except TurnFailed as failed:
            if entry is not None:
                await self._give_up(entry, _stale(failed.code.lower().replace("_", "-")))
            raise
        agrees = await self._agrees()
        if entry is not None:
            misfit = self._misfit(entry, agrees=agrees)
            if misfit is not None:
                await self._give_up(entry, misfit)
        if not agrees:
            # The agent's own record is of the same conversation; the log is what readers see.
            self._load = None

    async def _give_up(self, entry: Entry, misfit: Misfit) -> None:
        self._room.metrics.missed(misfit.word)
        logger.info("live session does not fit", extra={"session": str(self._key), "why": misfit.word})
        await self._room.entries.close(entry, misfit.reason)
        self.entry = None

    def _misfit(self, entry: Entry, *, agrees: bool) -> Misfit | None:
        live = entry.live
        assert live is not None, "an idle entry is a live one"
        if live.spec_digest != self._spec_digest and live.fingerprint != self._config():
            return _CONFIG
        if live.last_execution_id != self._picked.ended_execution_id:
            return _CONTINUITY
        if not agrees:
            return _HISTORY
        stale = credentials.stale(live.given, self._given, self._room.clock.now(), self._turn_limit)
        return _stale(stale.value) if stale is not None else None

    async def _agrees(self) -> bool:
        """Whether the conversation is the one that the caller believes it to be, if the caller said so."""
        expected = self._picked.expected_transcript
        if expected is None:
            return True
        return fingerprints.meets(await self._conversation(tail=fingerprints.wants_tail(expected)), expected)

    async def _what_it_is_given(self) -> Given:
        try:
            given = await until_it_lands(
                self._room.clock,
                self._key,
                "credentials",
                lambda: self._room.credentials.given(self._key.project, self.spec),
            )
        except HearthError as error:
            raise TurnFailed(error.reason, error.message, retryable=False) from None
        if not credentials.covers(given.lease, self._room.clock.now(), self._turn_limit):
            logger.warning(
                "credentials end before the turn may",
                extra={"session": str(self._key), "credentials": sorted(set(given))},
            )
        return given

    def _config(self) -> str:
        settings = self._room.settings
        return fingerprints.config_fingerprint(
            self.spec,
            fingerprints.Defaults(
                settings.default_agent,
                settings.default_provider,
                sessions.PermissionAction.Value(f"PERMISSION_ACTION_{settings.default_permission.upper()}"),
            ),
        )

    @contextmanager
    def _stage(self, name: str, *, long: bool = True) -> Iterator[Stage]:
        """A stage of the turn, which is counted if it ends well."""
        with self._stages.stage(name, long=long) as stage:
            yield stage
        self._room.metrics.stage(name, stage.how, self._stages.timings[-1].duration_us / 1e6)

    async def _acquire(self, entry: Entry, claim: Claim) -> Acquired:
        wanted = sandbox_pb2.SandboxSpec()
        wanted.CopyFrom(self.spec.sandbox)
        wanted.agent = self.agent
        wanted.secrets.extend(self._given.slots())
        try:
            with self._stage("acquire") as stage:
                acquired = await self._room.sandboxes.acquire(self._key, claim, wanted)
                stage.how = acquired.how
        except FailedPrecondition as error:
            if error.reason == "FENCED":
                raise Fenced(int(error.metadata.get("epoch", "0"))) from error
            raise TurnFailed(error.reason, error.message, retryable=False) from error
        except HearthError as error:
            raise TurnFailed(_failed_run(error.reason), error.message) from error
        self.sandbox_id = acquired.sandbox_id
        # A renewal of the claim of the turn before may have been refused for this one.
        self._room.entries.claimed(entry)
        self._room.sandboxes.hold(self._key, claim, sandbox_pb2.TENURE_ACTIVE, lambda fenced: self._lost(entry, fenced))
        return acquired

    async def _open(self, entry: Entry, acquired: Acquired) -> Ready:
        with self._stage("open") as stage:
            self.opening_kept = acquired.how != "created"
            harness = await self._open_session(entry, acquired)
            self.opening_kept = False
            stage.how = "load" if harness.loaded else "new"
        crashpoint("prepare.opened")
        entry.live = live = Live(
            harness,
            acquired.sandbox_id,
            acquired.endpoint.token,
            agent=self.agent,
            provider=self.provider,
            spec_digest=self._spec_digest,
            fingerprint=self._config(),
            given=self._given,
        )
        transcript = await self._what_it_missed(
            known=self._load.execution_id if harness.loaded and self._load else None
        )
        live.processes = await leftovers.own_processes(harness)
        how = "restarted" if acquired.how == "restarted" else "cold"
        return Ready(entry, live, how, transcript, acquired.workspace)

    async def _open_session(self, entry: Entry, acquired: Acquired) -> HarnessSession:
        request = OpenRequest(
            server_id=entry.entry_id,
            agent=self.agent,
            workspace=acquired.workspace,
            load_session_id=self._load.session_id if self._load is not None else None,
            mcp_servers=mcp_servers(self.spec, self._given),
            instructions=self.spec.instructions,
            model=self.spec.model,
            timeout=self._room.settings.open_timeout,
            trace_context=trace_context(),
        )
        try:
            return await self._room.harness.open(acquired.endpoint, request)
        except HarnessError as error:
            if request.load_session_id is None or error.fenced or error.reason in _NOT_OF_THE_SESSION:
                raise TurnFailed(error.reason, str(error)) from error
            logger.warning(
                "session was not loaded, a new one is opened",
                extra={"session": str(self._key), "reason": error.reason},
            )
        again = dataclasses.replace(request, server_id=f"{entry.entry_id}-new", load_session_id=None)
        try:
            return await self._room.harness.open(acquired.endpoint, again)
        except HarnessError as error:
            raise TurnFailed(error.reason, str(error)) from error

    async def _what_it_missed(self, *, known: str | None) -> str:
        """The conversation that the agent does not know: all of it, or what came after the execution `known`."""
        if self._picked.ended_execution_id in {None, known}:
            return ""

        async def read() -> str:
            transcript = Transcript(since_known=known is not None)
            async for event in self._room.log.newest_first(self._key):
                if known is not None and event.execution_id == known:
                    break
                if not self._own(event) and not transcript.add(event):
                    break
            return transcript.text()

        return await self._patiently(read)

    async def _conversation(self, *, tail: bool) -> list[fingerprints.Entry]:
        """What counts of the conversation before this turn; `tail`: at least from the last message of the user on."""

        async def read() -> list[fingerprints.Entry]:
            events: list[event_pb2.Event] = []
            async for event in self._room.log.newest_first(self._key):
                if self._own(event) or event.WhichOneof("body") not in _COUNTED:
                    continue
                events.append(event)
                if tail and event.message_completed.role == content_pb2.ROLE_USER:
                    break
            return fingerprints.conversation(reversed(events))

        return await self._patiently(read)

    async def _uncertain(self) -> list[Gate]:
        passed_on = [gate for gate in self._picked.continued if gate.state is GateState.CONSUMED]
        if not passed_on:
            return []
        runs = {gate.consumed_by for gate in passed_on}

        async def read() -> list[event_pb2.Event]:
            found, left = [], set(runs)
            async for event in self._room.log.newest_first(self._key):
                if event.execution_id in runs and event.HasField("tool_completed"):
                    found.append(event)
                elif event.HasField("execution_started"):
                    left.discard(event.execution_id)
                if not left:
                    break
            return found

        return continuing.without_result(passed_on, await self._patiently(read))

    def _own(self, event: event_pb2.Event) -> bool:
        return event.execution_id == self._picked.execution.execution_id

    async def _patiently(self, read: Callable[[], Awaitable[_T]]) -> _T:
        """A turn waits for history as long before it starts as for the acknowledgement that it may."""
        while True:
            try:
                return await read()
            except HearthError as error:
                if self._room.clock.monotonic() > self._gives_up_at:
                    raise TurnFailed("HISTORY_UNAVAILABLE", "the conversation so far cannot be read") from error
                logger.warning("waiting for history", extra={"session": str(self._key), "reason": error.reason})
            await self._room.clock.sleep(_LOG_RETRY_SECONDS)


def _failed_run(reason: str) -> str:
    """The reason of a failed run for a call to the sandbox service that failed with `reason`."""
    return "PROVIDER_UNAVAILABLE" if reason in {"UNSPECIFIED", "DEPENDENCY_UNAVAILABLE", "SANDBOX_BUSY"} else reason


def trace_context() -> Mapping[str, str]:
    """What carries the current trace into the agent."""
    traceparent = telemetry.inject()
    return {"traceparent": traceparent} if traceparent else {}


def mcp_servers(spec: sessions.SessionSpec, given: Given = NOTHING) -> list[McpServer]:
    """The MCP servers of a spec, with the credentials that they are given."""
    servers = []
    for server in spec.mcp_servers:
        secret = given.of_server(server.name)
        if server.HasField("http"):
            servers.append(McpServer(server.name, url=server.http.url, values=hidden(server.http.headers) | secret))
        else:
            values = hidden(server.stdio.env) | secret
            servers.append(McpServer(server.name, command=list(server.stdio.command), values=values))
    return servers
