"""Turns through all four services, and what of their time was Hearth's own.

A turn is sent, the agent is asked, the agent answers, the turn is settled. Between being asked and answering it is the
agent's time; all the rest is Hearth's. The agent says when it was asked and when it answered, the trace of the turn
says when it was settled, and all of them read the clock of this machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.rig import Rig, Service
from hearth.client import Addresses, Client, session_key
from hearth.session.v1 import session_pb2 as sessions
from hearth.types.v1 import event_pb2, session_pb2
from hearth.watch import Watch

PROJECT = "bench"
# What is sent; the agent answers it at once.
TEXT = "hello"
# A person reads the answer before writing again: by then the turn is settled and its agent parked.
PAUSE_SECONDS = 0.05
_TURN_SECONDS = 60.0
_TRACE_SECONDS = 10.0
_ENDINGS = ("execution_completed", "execution_stopped", "execution_failed", "execution_lost", "execution_paused")


@dataclass(frozen=True, slots=True)
class House:
    """The four services of a benchmark, with auth and traces on."""

    services: Mapping[str, Service]
    client: Client
    trace_file: Path
    token: str = ""

    @property
    def pool(self) -> Service:
        """The pool process, the first of several."""
        return self.services["pool"]

    @property
    def pools(self) -> list[Service]:
        """All pool processes."""
        return [service for name, service in self.services.items() if name.startswith("pool")]

    def client_of(self, pool: Service) -> Client:
        """A client that reaches this one pool process only."""
        return Client(addresses_of(self.services, [pool]), token=self.token)


@dataclass(slots=True)
class Turn:
    """One turn. Times are nanoseconds since 1970; `settled` is 0 until it is known. `stages` are seconds by name."""

    execution_id: str
    how: str
    ending: str
    agent_pid: int
    turns_in_memory: int
    sent: int
    prompted: int
    answered: int
    seen: int
    settled: int = 0
    stages: dict[str, float] = field(default_factory=dict)

    @property
    def to_prompt(self) -> float:
        """Seconds from the request to the prompt at the agent."""
        return (self.prompted - self.sent) / 1e9

    @property
    def to_settled(self) -> float:
        """Seconds from the agent's answer until the turn was settled."""
        return (self.settled - self.answered) / 1e9

    @property
    def overhead(self) -> float:
        """Seconds that were Hearth's own."""
        return self.to_prompt + self.to_settled


def addresses_of(services: Mapping[str, Service], pools: Iterable[Service]) -> Addresses:
    """Where the services are, with these processes of the pool. Pure."""
    where = {name: services[name].address for name in ("history", "relay", "sandbox")}
    return Addresses(pool=",".join(pool.address for pool in pools), **where)


@asynccontextmanager
async def house(rig: Rig, pools: int = 1, /, **environment: str) -> AsyncIterator[House]:
    """All four services on one rig, with so many processes of the pool. `environment` is for all of them."""
    tokens = {name: secrets.token_urlsafe(24) for name in ("services", "client")}
    scopes = {"services": ["read", "run", "admin", "internal"], "client": ["read", "run", "admin"]}
    auth = rig.directory / "tokens.json"
    auth.write_text(
        json.dumps(
            {
                hashlib.sha256(token.encode()).hexdigest(): {"name": name, "project": "*", "scopes": scopes[name]}
                for name, token in tokens.items()
            }
        )
    )
    trace_file = rig.directory / "pool.traces.jsonl"
    shared = {
        "HEARTH_AUTH_FILE": str(auth),
        "HEARTH_TOKEN": tokens["services"],
        "HEARTH_LOCAL_ROOT": str(rig.directory / "sandboxes"),
        **environment,
    }
    services: dict[str, Service] = {}
    replicas = ["pool", *(f"pool{number}" for number in range(2, pools + 1))]
    for name in ("history", "relay", "sandbox", *replicas):
        traces = {"HEARTH_TRACE_FILE": str(rig.directory / f"{name}.traces.jsonl")}
        known = {
            f"HEARTH_{other.upper()}_ADDRESS": service.address
            for other, service in services.items()
            if other not in replicas
        }
        module = "pool" if name in replicas else name
        services[name] = await rig.service(name, module, **{**shared, **known, **traces})
    where = addresses_of(services, [services[name] for name in replicas])
    async with Client(where, token=tokens["client"]) as client:
        yield House(services, client, trace_file, tokens["client"])


class Talk:
    """One session, and a reader of it that stays. For `async with`."""

    def __init__(self, client: Client, name: str, spec: sessions.SessionSpec | None = None) -> None:
        self.key = session_key(PROJECT, name)
        self._client = client
        self._spec = spec
        self._endings: asyncio.Queue[tuple[event_pb2.Event, int]] = asyncio.Queue()
        self._reading: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Talk:
        self._reading = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._reading is not None
        self._reading.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)

    async def turn(self, text: str = TEXT) -> Turn:
        """Send a message and wait until its ending has come."""
        request_id = str(uuid.uuid4())
        sent = time.time_ns()
        answer = await self._client.send(self.key, text, request_id=request_id, spec=self._spec)
        execution_id = answer.started.execution.execution_id
        async with asyncio.timeout(_TURN_SECONDS):
            while True:
                event, seen = await self._endings.get()
                if event.execution_id == execution_id:
                    return read_turn(event, sent=sent, seen=seen)

    async def _read(self) -> None:
        async for item in Watch(self._client.relays, self.key, events_only=False):
            if item.HasField("event") and ending_of(item.event.event):
                self._endings.put_nowait((item.event.event, time.time_ns()))


def ending_of(event: event_pb2.Event) -> str:
    """Which ending an event is; empty for anything else. Pure."""
    return next((name for name in _ENDINGS if event.HasField(name)), "")  # type: ignore[arg-type]


def read_turn(event: event_pb2.Event, *, sent: int, seen: int) -> Turn:
    """A turn by its ending. Pure."""
    kind = ending_of(event)
    summary = getattr(event, kind).summary
    report = json.loads(summary.agent_report_json or "{}")
    agent, times = report.get("hearth.dev/agent", {}), report.get("hearth.dev/times", {})
    return Turn(
        execution_id=event.execution_id,
        how=summary.how,
        ending=kind,
        agent_pid=agent.get("pid", 0),
        turns_in_memory=agent.get("turns_in_memory", 0),
        sent=sent,
        prompted=times.get("prompted_ns", 0),
        answered=times.get("answered_ns", 0),
        seen=seen,
        stages={stage.stage: stage.duration_us / 1e6 for stage in summary.stages},
    )


def settlements(lines: Iterable[str]) -> dict[str, int]:
    """When each turn was settled, by execution, from the finished spans of the pool. Pure."""
    executions: dict[str, str] = {}
    settled: dict[str, int] = {}
    for line in lines:
        span = json.loads(line)
        if span["name"] == "turn":
            executions[span["span_id"]] = span["attributes"]["hearth.execution"]
        elif span["name"] == "turn.settle" and span["parent_id"]:
            settled[span["parent_id"]] = span["end_ns"]
    return {execution: settled[span] for span, execution in executions.items() if span in settled}


async def settle(turns: Iterable[Turn], trace_file: Path) -> None:
    """Fill in when turns were settled; spans reach the file a moment after they ended."""
    missing = {turn.execution_id: turn for turn in turns}
    ends = time.monotonic() + _TRACE_SECONDS
    while missing and time.monotonic() < ends:
        text = await asyncio.to_thread(trace_file.read_text)
        whole = text[: text.rfind("\n") + 1]
        for execution, at in settlements(whole.splitlines()).items():
            if (turn := missing.pop(execution, None)) is not None:
                turn.settled = at
        if missing:
            await asyncio.sleep(0.3)


def check(turns: Iterable[Turn], how: str) -> list[str]:
    """What is wrong with turns that all must have started `how`. Pure."""
    problems = []
    for turn in turns:
        if turn.ending != "execution_completed":
            problems.append(f"a turn ended as {turn.ending}")
        elif turn.how != how:
            problems.append(f"a turn was {turn.how or 'unstarted'}, not {how}")
        elif not turn.sent < turn.prompted <= turn.answered:
            problems.append("an agent did not say when it was asked")
        elif not turn.settled:
            problems.append("a turn was not settled")
    return problems


def check_memory(turns: list[Turn]) -> list[str]:
    """Whether the warm turns of one session were answered by one process that remembers them all. Pure."""
    if len({turn.agent_pid for turn in turns}) > 1:
        return ["warm turns of one session were answered by several processes"]
    counts = [turn.turns_in_memory for turn in turns]
    if counts != list(range(counts[0], counts[0] + len(counts))) if counts else False:
        return ["an agent has forgotten turns"]
    return []


def new_session(prefix: str) -> session_pb2.SessionKey:
    """A session that nobody used."""
    return session_key(PROJECT, f"{prefix}-{uuid.uuid4().hex[:8]}")
