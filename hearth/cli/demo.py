"""`hearth demo`: a conversation through four services, with every promise checked as it goes.

On `local` it is five turns. With `--provider daytona` it is the ladder of warm sandboxes on Daytona through the real
SDK, and a turn whose tools ask for leave.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from hearth.cli import stand_in
from hearth.cli.output import Exit, err, fail, out, print_json, run, say
from hearth.cli.promises import DemoResult, LateReader, Replay, TurnResult, broken_promises
from hearth.client import Addresses, Client, session_key
from hearth.embedded.stack import SERVICES, Say, Stack, StackError, StackOptions
from hearth.pool.v1 import pool_service_pb2
from hearth.reducer import ending_summary, is_ending, text_of
from hearth.relay.v1 import relay_pb2
from hearth.session.v1 import session_pb2 as control_pb2
from hearth.session.v1 import session_service_pb2
from hearth.types.v1 import content_pb2, event_pb2, session_pb2

PROVIDERS = ("local", "daytona")
TURN_SECONDS = 60.0
STREAMED_FRAMES_BEFORE_JOIN = 15
STREAMED_FRAMES_BEFORE_STOP = 10


def register(app: typer.Typer) -> None:
    """Add the command of this file."""
    app.command()(demo)


def demo(
    provider: Annotated[str, typer.Option(help="where the sandboxes run: local or daytona")] = "local",
    daytona_url: Annotated[
        str, typer.Option(help="API of a Daytona; empty: a stand-in on this machine, from a clone of the repository")
    ] = "",
    daemon: Annotated[
        str, typer.Option(help="in the stand-in's sandboxes: agentd, sandbox-agent, or a path of the latter")
    ] = "agentd",
    json: Annotated[bool, typer.Option("--json", help="one JSON object on stdout instead of a table")] = False,
) -> None:
    """Run a conversation on a stack of its own: cold, warm, restarted, read by two, stopped, replayed.

    On Daytona: cold, warm, restarted, and a turn with tools and permissions, which a policy decides. Leaves nothing
    behind. Exit code 1 when a promise was broken.
    """
    if provider not in PROVIDERS:
        raise typer.BadParameter(f"{provider!r} is none of {', '.join(PROVIDERS)}", param_hint="--provider")
    if daytona_url and provider != "daytona":
        raise typer.BadParameter("goes with --provider daytona", param_hint="--daytona-url")
    result = run(_on_a_fresh_stack(provider, daytona_url, daemon, quiet=json))
    broken = broken_promises(result)
    if json:
        print_json(dataclasses.asdict(result))
    else:
        _print_table(result)
    for promise in broken:
        err.print(f"[red]broken:[/red] {escape(promise)}")
    if broken:
        raise typer.Exit(Exit.FAILED)
    if not json:
        out.print("[green]Every promise of the demo held.[/green]")


async def _on_a_fresh_stack(provider: str, daytona_url: str, daemon: str, *, quiet: bool) -> DemoResult:
    with tempfile.TemporaryDirectory(prefix="hearth-demo-") as directory:
        # The embedded Postgres may run as another user, who has to get through to its own directory.
        os.chmod(directory, 0o755)  # noqa: S103 - it holds nothing but a demo
        root = Path(directory)
        tell = (lambda _: None) if quiet else say
        try:
            if provider == "local":
                return await _on_a_stack(root, {}, provider, tell, quiet=quiet)
            async with stand_in.daytona(root, daytona_url, daemon, tell) as environment:
                return await _on_a_stack(root, environment, provider, tell, quiet=quiet)
        except (StackError, stand_in.Unusable) as error:
            fail(str(error))


async def _on_a_stack(
    root: Path, environment: Mapping[str, str], provider: str, tell: Say, *, quiet: bool
) -> DemoResult:
    stack = Stack(StackOptions(root=root, ports=dict.fromkeys(SERVICES, 0), environment=environment))
    try:
        await stack.up(tell)
        record = stack.record()
        assert record is not None
        where = Addresses(*(record.address(name) for name in ("pool", "history", "relay", "sandbox")))
        async with Client(where) as client:
            conversation = _Conversation(client, quiet=quiet)
            return await (conversation.on_daytona() if provider == "daytona" else conversation.run())
    finally:
        await asyncio.shield(stack.down(tell))


class _Conversation:
    """The turns, and the readers beside them. The first reader watches from before the first turn to the end."""

    def __init__(self, client: Client, *, quiet: bool) -> None:
        self._client = client
        self._quiet = quiet
        self._key = session_key("demo", f"demo-{uuid.uuid4().hex[:8]}")
        self._reader = _Reader()
        self._number = 0
        self._spec: control_pb2.SessionSpec | None = None

    async def run(self) -> DemoResult:
        """On this machine."""
        late = _Reader()
        async with self._watched():
            turns = await self._ladder()
            turns.append(await self._turn("a second reader joins in the middle", "stream 120 words at 60/s", late=late))
            turns.append(await self._turn("a Stop in the middle", "stream 3000 words at 60/s", stop=True))
            replayed = await self._replayed()
        complete = late.complete(turns[3].execution_id, replayed) and late.joined_live
        return DemoResult(turns, LateReader(complete=complete), self._compared(replayed))

    async def on_daytona(self) -> DemoResult:
        """On Daytona."""
        self._spec = control_pb2.SessionSpec(
            permissions=control_pb2.PermissionPolicy(
                default_action=control_pb2.PERMISSION_ACTION_DENY,
                rules=[control_pb2.PermissionRule(tool="search", action=control_pb2.PERMISSION_ACTION_ALLOW)],
            )
        )
        try:
            async with self._watched():
                turns = await self._ladder()
                asking = 'ask search {"for": "hearths"}\nask remove {"path": "everything"}'
                turns.append(await self._turn("tools that ask for leave, decided by the policy", asking))
                replayed = await self._replayed()
        finally:
            await self._let_go()
        return DemoResult(turns, None, self._compared(replayed), "daytona")

    async def _ladder(self) -> list[TurnResult]:
        turns = [
            await self._turn("a cold start", "remember my name is Ada"),
            await self._turn("the same agent, still warm", "what is my name?"),
        ]
        await self._client.pools.EvictEntry(
            pool_service_pb2.EvictEntryRequest(session=self._key, request_id=str(uuid.uuid4())),
            timeout=TURN_SECONDS,
        )
        turns.append(await self._turn("parked to stopped, restarted from its disk", "what is my name?"))
        return turns

    async def _let_go(self) -> None:
        """Delete the sandbox and its workspace: at a provider they would outlive the demo."""
        await self._client.sessions.DeleteSession(
            session_service_pb2.DeleteSessionRequest(session=self._key, request_id=str(uuid.uuid4())),
            timeout=TURN_SECONDS,
        )

    @contextlib.asynccontextmanager
    async def _watched(self) -> AsyncIterator[None]:
        watching = asyncio.create_task(self._reader.follow(self._client, self._key))
        try:
            yield
        finally:
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def _replayed(self) -> list[event_pb2.EventItem]:
        """The log, once the reader has all of it too."""
        replayed = [item async for item in self._client.history(self._key)]
        await self._reader.until_sequence(replayed[-1].cursor.sequence if replayed else 0)
        return replayed

    def _compared(self, replayed: list[event_pb2.EventItem]) -> Replay:
        return Replay(
            events=len(replayed),
            contiguous=[item.cursor.sequence for item in replayed] == list(range(1, len(replayed) + 1)),
            equal=_bytes_of(replayed) == _bytes_of(self._reader.events),
        )

    async def _turn(self, title: str, text: str, *, late: _Reader | None = None, stop: bool = False) -> TurnResult:
        self._number += 1
        if not self._quiet:
            err.print(f"[bold]{self._number}[/bold] {title}: [cyan]{escape(text)}[/cyan]")
        begun = time.monotonic()
        sent = await self._client.send(self._key, text, spec=self._spec if self._number == 1 else None)
        execution_id = sent.started.execution.execution_id
        following: asyncio.Task[None] | None = None
        async with asyncio.timeout(TURN_SECONDS):
            if late is not None:
                await self._reader.until_frames(execution_id, STREAMED_FRAMES_BEFORE_JOIN)
                following = asyncio.create_task(late.follow(self._client, self._key, until=execution_id))
            if stop:
                await self._reader.until_frames(execution_id, STREAMED_FRAMES_BEFORE_STOP)
                await self._client.stop(self._key, execution_id=execution_id)
            ending = await self._reader.until_ending(execution_id)
            total_ms = (time.monotonic() - begun) * 1000
            if following is not None:
                await following
        return self._result(execution_id, ending, begun, total_ms)

    def _result(self, execution_id: str, ending: event_pb2.Event, begun: float, total_ms: float) -> TurnResult:
        summary = ending_summary(ending) or event_pb2.EndingSummary()
        report: dict[str, Any] = json.loads(summary.agent_report_json or "{}")
        agent: dict[str, Any] = report.get("hearth.dev/agent", {})
        first = self._reader.first_text_at.get(execution_id)
        events = [item.event for item in self._reader.events if item.event.execution_id == execution_id]
        result = TurnResult(
            n=self._number,
            execution_id=execution_id,
            how=summary.how,
            outcome=ending.type.removeprefix("execution."),
            agent_pid=int(agent.get("pid", 0)),
            agent_turns_in_memory=int(agent.get("turns_in_memory", 0)),
            agent_session_loaded=bool(agent.get("session_loaded", False)),
            sandbox_id=summary.sandbox_id,
            stages_ms={stage.stage: round(stage.duration_us / 1000, 1) for stage in summary.stages},
            first_output_ms=round((first - begun) * 1000, 1) if first is not None else None,
            total_ms=round(total_ms, 1),
            events=len(events),
            frames=self._reader.frames.get(execution_id, 0),
            text=" ".join(_agent_texts(events)),
            tools=[_tool(event.tool_completed) for event in events if event.HasField("tool_completed")],
            permissions=[
                _permission(event.interaction_resolved) for event in events if event.HasField("interaction_resolved")
            ],
        )
        if not self._quiet:
            err.print(f"  [green]{escape(result.text[:70])}[/green]", soft_wrap=True)
        return result


class _Reader:
    """One reader of the session, which keeps what it was given in the order in which it came."""

    def __init__(self) -> None:
        self.events: list[event_pb2.EventItem] = []
        self.frames: dict[str, int] = {}
        self.first_text_at: dict[str, float] = {}
        self.joined_live = False
        self._previews: dict[str, str] = {}
        self._broken: set[str] = set()
        self._endings: dict[str, event_pb2.Event] = {}
        self._changed = asyncio.Condition()

    async def follow(self, client: Client, key: session_pb2.SessionKey, *, until: str = "") -> None:
        async for item in client.watch(key):
            async with self._changed:
                self._take(item)
                self._changed.notify_all()
            if until in self._endings:
                return

    def _take(self, item: relay_pb2.Item) -> None:
        match item.WhichOneof("item"):
            case "event":
                self.events.append(item.event)
                if is_ending(item.event.event.type):
                    self._endings[item.event.event.execution_id] = item.event.event
            case "frame":
                frame = item.frame.frame
                last = frame.merged_through if frame.HasField("merged_through") else frame.frame_index
                count = last - frame.frame_index + 1
                self.frames[item.frame.execution_id] = self.frames.get(item.frame.execution_id, 0) + count
                if frame.HasField("text_delta"):
                    self.first_text_at.setdefault(item.frame.execution_id, time.monotonic())
                    entity = frame.entity_id
                    self._previews[entity] = self._previews.get(entity, "") + frame.text_delta.text
            case "gap":
                self._broken.add(item.gap.execution_id)
            case "ready":
                # What was running when replay ended is what this reader joined in the middle.
                started = {e.event.execution_id for e in self.events if e.event.HasField("execution_started")}
                self.joined_live = bool(started - set(self._endings))

    def complete(self, execution_id: str, log: list[event_pb2.EventItem]) -> bool:
        """Whether it got every event up to the ending, and frames that add up to each message without a gap."""
        own = [item.event for item in self.events if item.event.execution_id == execution_id]
        agent_messages = {
            event.message_completed.message_id: text_of(event.message_completed.content)
            for event in own
            if event.message_completed.role == content_pb2.ROLE_AGENT
        }
        texts_match = all(self._previews.get(entity) == text for entity, text in agent_messages.items())
        return (
            bool(agent_messages)
            and texts_match
            and execution_id not in self._broken
            and _bytes_of(self.events) == _bytes_of(log[: len(self.events)])
        )

    async def until_frames(self, execution_id: str, count: int) -> None:
        async with self._changed:
            await self._changed.wait_for(
                lambda: self.frames.get(execution_id, 0) >= count or execution_id in self._endings
            )

    async def until_ending(self, execution_id: str) -> event_pb2.Event:
        async with self._changed:
            await self._changed.wait_for(lambda: execution_id in self._endings)
            return self._endings[execution_id]

    async def until_sequence(self, sequence: int) -> None:
        async with asyncio.timeout(TURN_SECONDS), self._changed:
            await self._changed.wait_for(
                lambda: sequence == 0 or (bool(self.events) and self.events[-1].cursor.sequence >= sequence)
            )


def _bytes_of(items: list[event_pb2.EventItem]) -> list[bytes]:
    return [item.SerializeToString(deterministic=True) for item in items]


def _agent_texts(events: list[event_pb2.Event]) -> list[str]:
    return [
        text_of(event.message_completed.content)
        for event in events
        if event.message_completed.role == content_pb2.ROLE_AGENT
    ]


def _tool(tool: event_pb2.ToolCompleted) -> tuple[str, str]:
    return tool.name, event_pb2.ToolStatus.Name(tool.status).removeprefix("TOOL_STATUS_").lower()


def _permission(resolved: event_pb2.InteractionResolved) -> tuple[str, str]:
    return event_pb2.Decision.Name(resolved.decision).removeprefix("DECISION_").lower(), resolved.decided_by


def _print_table(result: DemoResult) -> None:
    stages = list(dict.fromkeys(stage for turn in result.turns for stage in turn.stages_ms))
    table = Table(title="one conversation, times in ms", title_justify="left", box=None, pad_edge=False)
    for column in ("turn", "how", "outcome", *stages, "first text", "total", "events", "frames"):
        table.add_column(column, justify="left" if column in ("how", "outcome") else "right", no_wrap=True)
    for turn in result.turns:
        times = [turn.stages_ms.get(stage) for stage in stages]
        cells = ["" if time is None else f"{time:.0f}" for time in (*times, turn.first_output_ms, turn.total_ms)]
        table.add_row(str(turn.n), turn.how, turn.outcome, *cells, str(turn.events), str(turn.frames))
    out.print(table)
    if result.late_reader is not None:
        late = "saw all of it" if result.late_reader.complete else "MISSED SOMETHING"
        out.print(f"late reader of turn 4: {late}", soft_wrap=True)
    for turn in result.turns:
        for (tool, status), (decision, decider) in zip(turn.tools, turn.permissions, strict=False):
            out.print(f"tool of turn {turn.n}: {escape(tool)} {decision} by {decider}, {status}", soft_wrap=True)
    out.print(
        f"replay from 0: {result.replay.events} events, contiguous: {result.replay.contiguous},"
        f" equal to what the reader saw live: {result.replay.equal}",
        soft_wrap=True,
    )
