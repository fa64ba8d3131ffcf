"""A whole run with planted secrets and planted payloads, each a text that is nowhere else: none of them is in a log, a
trace, the metrics, an error, the output of a command that looks, or a command line."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import signal
import sys
import traceback
import uuid
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp
import psutil
import pytest
import pytest_asyncio
import redis.asyncio
from google.protobuf import json_format

from hearth.cli.stand_in import daytona
from hearth.client import Addresses, Client, new_id, session_key, text_content
from hearth.errors import CallError
from hearth.sandbox.v1 import sandbox_pb2
from hearth.session.v1 import session_pb2
from hearth.types.v1 import content_pb2, event_pb2
from hearth.types.v1 import session_pb2 as types_pb2
from services.pool.sealing import new_key
from tests.security.guarded import entry, write
from tests.support.cli import Hearth, running
from tests.support.servers import Servers

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

PROJECT = "acme"
# What a stack keeps of a session, which is what it is for, and the data of its stores.
KEPT = ("sandboxes", "postgres", "valkey")
# Read by the commands that need them, and by nobody else.
PRIVATE = {"stack.json": {"dsn", "bus"}, "secret.key": {"sealing"}}


def word(name: str) -> str:
    """A text that is nowhere else."""
    return f"planted-{name}-{uuid.uuid4().hex}"


@dataclass
class Planted:
    """Secrets and payloads by name."""

    secrets: dict[str, str] = field(
        default_factory=lambda: (
            {
                name: word(name)
                for name in ("dsn", "bus", "service", "project", "wrong", "credential", "deployment", "variable")
            }
            | {"sealing": new_key().rstrip("=\n")}
        )
    )
    payloads: Mapping[str, str] = field(
        default_factory=lambda: {
            name: word(name) for name in ("prompt", "answer", "tool", "file", "failure", "queued", "approval")
        }
    )

    def found(self, text: str) -> set[str]:
        """The names of those that a text has."""
        return {name for name, value in {**self.secrets, **self.payloads}.items() if value in text}


@dataclass
class Run:
    """The stack, and what somebody was shown of it, by who showed it."""

    hearth: Hearth
    planted: Planted
    provider: str
    shown: dict[str, str] = field(default_factory=dict)

    def client(self, token: str) -> Client:
        """Calls with a token."""
        return Client(Addresses(**self.hearth.addresses()), token=token)

    def show(self, where: str, text: str) -> None:
        """Keep what was shown."""
        self.shown[where] = self.shown.get(where, "") + text

    async def refused(self, where: str, call: Awaitable[object]) -> None:
        """A call that fails; what its caller is told is shown."""
        with pytest.raises(CallError) as caught:
            await call
        cause = caught.value.__cause__
        self.show(where, "".join(traceback.format_exception(caught.value)) + repr(vars(caught.value)) + repr(cause))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["local", "daytona"])
async def run(servers: Servers, request: pytest.FixtureRequest) -> AsyncIterator[Run]:
    planted, directory = Planted(), servers.scratch()
    secrets = planted.secrets
    async with contextlib.AsyncExitStack() as stack:
        database, valkey = servers.create_database(), servers.empty_valkey()
        stack.callback(servers.drop_database, database)
        bus = await stack.enter_async_context(redis.asyncio.Redis.from_url(valkey))
        await bus.acl_setuser(
            "planted", enabled=True, passwords=[f"+{secrets['bus']}"], keys=["*"], channels=["*"], categories=["+@all"]
        )
        stack.push_async_callback(bus.acl_deluser, "planted")
        file = directory / "tokens.json"
        write(file, {secrets["service"]: entry("service", "*"), secrets["project"]: entry("backend", PROJECT)})
        command = [sys.executable, "-P", "-m", "hearth.agents.scripted"]
        environment = {
            "HEARTH_POSTGRES_DSN": with_password(database, "", secrets["dsn"]),
            "HEARTH_VALKEY_URL": with_password(valkey, "planted", secrets["bus"]),
            "HEARTH_AUTH_FILE": str(file),
            "HEARTH_TOKEN": secrets["service"],
            "HEARTH_SECRET_KEY": secrets["sealing"],
            "HEARTH_AGENTS": json.dumps({"keyed": {"command": command, "env": {"OWN": secrets["deployment"]}}}),
            "HEARTH_LOG_LEVEL": "DEBUG",
        }
        if request.param == "daytona":
            place = directory / "daytona"
            place.mkdir()
            environment |= await stack.enter_async_context(daytona(place, "", "agentd", lambda _: None))
            secrets["api"] = environment["HEARTH_DAYTONA_API_KEY"]
        hearth = await stack.enter_async_context(running(directory / ".hearth", environment))
        yield Run(hearth, planted, request.param)


def with_password(url: str, user: str, password: str) -> str:
    """The URL with other credentials; without a user the one that it has."""
    found = urlsplit(url)
    host = found.netloc.rpartition("@")[2]
    return found._replace(netloc=f"{user or found.username or ''}:{password}@{host}").geturl()


def visible(root: Path) -> Iterator[Path]:
    """The files that a stack writes of itself: logs, traces, records."""
    for path in root.rglob("*"):
        if path.is_file() and path.relative_to(root).parts[0] not in KEPT:
            yield path


async def talk(run: Run) -> None:
    """Turns that end well and badly, with everything that is planted in them."""
    secrets, payloads = run.planted.secrets, run.planted.payloads
    spec = session_pb2.SessionSpec(
        agent="keyed",
        credentials=[session_pb2.CredentialBinding(credential="KEY", target="MODEL_KEY")],
        permissions=session_pb2.PermissionPolicy(default_action=session_pb2.PERMISSION_ACTION_ASK),
        sandbox=sandbox_pb2.SandboxSpec(env={"OF_SPEC": secrets["variable"]}),
    )
    key = session_key(PROJECT, "talk")
    async with run.client(secrets["project"]) as client:
        await client.admin.put_credential(PROJECT, "KEY", secrets["credential"])
        file = await client.attach(key, payloads["file"].encode(), name="notes.txt", media_type="text/plain")
        lines = [
            payloads["prompt"],
            f"remember my name is {payloads['answer']}",
            f"tool search {json.dumps({'for': payloads['tool']})}",
            f"read .hearth/attachments/{file.attachment_id}/notes.txt",
            'run printf "%s %s %s" "$MODEL_KEY" "$OWN" "$OF_SPEC" | sha256sum',
        ]
        content = [*text_content("\n".join(lines)), content_pb2.ContentPart(attachment=file)]
        sent = await client.send(key, content, spec=spec)
        transcript = await ended(client, key, sent.started.execution.execution_id)
        given = " ".join(secrets[name] for name in ("credential", "deployment", "variable"))
        told = json.dumps([text_of(item) async for item in client.history(key)])
        assert hashlib.sha256(given.encode()).hexdigest() in told
        for name in ("prompt", "answer", "tool", "file"):
            assert payloads[name] in told, name
        assert transcript == "completed"

        await client.send(session_key(PROJECT, "garbage"), f"{payloads['prompt']}\ngarbage", spec=spec)
        for number, ending in enumerate((f"error {payloads['failure']}", "crash 3", "crash-silent")):
            failing = session_key(PROJECT, f"failing-{number}")
            sent = await client.send(failing, f"{payloads['prompt']}\n{ending}", spec=spec)
            assert await ended(client, failing, sent.started.execution.execution_id) == "failed"
        asking = session_key(PROJECT, "asking")
        sent = await client.send(asking, f"ask rm {json.dumps({'path': payloads['approval']})}", spec=spec)
        await client.send(asking, payloads["queued"])
        await client.stop(asking, execution_id=sent.started.execution.execution_id)
        await ended(client, asking, sent.started.execution.execution_id)


async def ended(client: Client, key: types_pb2.SessionKey, execution: str) -> str:
    """How an execution ended."""
    async with asyncio.timeout(60):
        outcome = ""
        async for transcript in client.follow(key, until_ended=execution):
            outcome = transcript.outcome
    return outcome


def text_of(item: event_pb2.EventItem) -> str:
    """An event as text."""
    return json_format.MessageToJson(item)


async def ask_wrongly(run: Run) -> None:
    """Calls that are refused."""
    secrets, payloads = run.planted.secrets, run.planted.payloads
    key = session_key(PROJECT, "talk")
    async with run.client(secrets["wrong"]) as stranger:
        await run.refused("unknown token", stranger.get_session(key))
    async with run.client(secrets["project"]) as client:
        theirs = session_key("other", "s")
        await run.refused("other project", client.send(theirs, payloads["prompt"]))
        wrong = session_pb2.SessionSpec(sandbox=sandbox_pb2.SandboxSpec(env={"1=": secrets["variable"]}))
        await run.refused("wrong variable", client.send(session_key(PROJECT, "new"), payloads["prompt"], spec=wrong))
        taken = new_id()
        await client.admin.put_credential(PROJECT, "KEY", secrets["credential"], request_id=taken)
        await run.refused("used", client.admin.put_credential(PROJECT, "K", secrets["credential"], request_id=taken))
        put = client.admin.put_credential(PROJECT, "no name", secrets["credential"])
        await run.refused("wrong name", put)
        large = client.send(session_key(PROJECT, "new"), payloads["prompt"] * 100_000)
        await run.refused("too large", large)


async def start_wrongly(run: Run) -> None:
    """Processes that cannot start."""
    secrets = run.planted.secrets
    dsn, bus = secrets["dsn"], secrets["bus"]
    good = {"HEARTH_POSTGRES_DSN": f"postgresql://u:{dsn}@127.0.0.1:1/d", "HEARTH_VALKEY_URL": "redis://127.0.0.1:1/0"}
    real = run.hearth.environment["HEARTH_POSTGRES_DSN"]
    unknown = run.hearth.environment["HEARTH_VALKEY_URL"].replace("planted:", "nobody:")
    wrong = [
        ("services.history", good),
        ("services.history", {**good, "HEARTH_POSTGRES_DSN": f"mysql://u:{dsn}@h/d"}),
        ("services.history", {**good, "HEARTH_POSTGRES_DSN": f"postgresql://u:{dsn}@h:port/d"}),
        ("services.history", {**good, "HEARTH_POSTGRES_DSN": f"postgresql://u:{dsn}@[h/d"}),
        ("services.history", {**good, "HEARTH_POSTGRES_DSN": f"postgresql://u:{dsn}@127.0.0.1:1/d?sslmode={dsn}"}),
        ("services.history", {**good, "HEARTH_POSTGRES_DSN": f"{real}-none"}),
        ("services.relay", {"HEARTH_VALKEY_URL": f"redis://u:{bus}@127.0.0.1:1/0"}),
        ("services.relay", {"HEARTH_VALKEY_URL": f"redis://u:{bus}@127.0.0.1:port/0"}),
        ("services.relay", {"HEARTH_VALKEY_URL": f"redis://u:{bus}@[h/0"}),
        ("services.relay", {"HEARTH_VALKEY_URL": f"http://u:{bus}@h"}),
        (
            "services.relay",
            {"HEARTH_VALKEY_URL": unknown},
        ),
        ("services.pool", {**good, "HEARTH_SECRET_KEY": f"{secrets['sealing']},{secrets['wrong']}"}),
        ("services.sandbox", {**good, "HEARTH_AGENTS": json.dumps({"a": {"command": [], "env": {"K": dsn}}})}),
        ("services.sandbox", {**good, "HEARTH_DAYTONA_API_KEY": dsn, "HEARTH_PROVIDERS": "daytona,none"}),
    ]
    quick = {"HEARTH_POSTGRES_START_TIMEOUT": "0", "HEARTH_VALKEY_START_TIMEOUT": "0", "HEARTH_LOG_LEVEL": "DEBUG"}
    base = {name: value for name, value in os.environ.items() if not name.startswith("HEARTH_")}

    async def start(number: int, module: str, environment: Mapping[str, str]) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", module),
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            env={**base, **quick, "HEARTH_LISTEN": "127.0.0.1:0", **environment},
        )
        async with asyncio.timeout(240):
            told, _ = await process.communicate()
        assert process.returncode in (1, 2), told.decode()
        run.show(f"start {number} of {module}", told.decode())

    await asyncio.gather(*(start(number, module, environment) for number, (module, environment) in enumerate(wrong)))


async def look(run: Run) -> None:
    """Everything that shows something, is asked."""
    hearth = run.hearth
    commands = ("status", "doctor --json", "sessions", "pool entries", "pool stats", "sandboxes list", "trace latest")
    for command, done in zip(
        commands, await asyncio.gather(*(hearth.run(*one.split()) for one in commands)), strict=True
    ):
        run.show(f"hearth {command}", done.stdout + done.stderr)
    async with aiohttp.ClientSession() as http:
        for part in json.loads((hearth.root / "stack.json").read_text())["processes"]:
            if part["metrics"]:
                async with http.get(f"http://{part['metrics']}/metrics") as page:
                    run.show(f"metrics of {part['name']}", await page.text())
    for process in psutil.process_iter(["cmdline"]):
        run.show("command lines", "\n".join(process.info["cmdline"] or []) + "\n")
    for path in visible(hearth.root):
        run.show(str(path.relative_to(hearth.root)), path.read_text("utf-8", "replace"))
    # Of sandboxes only what their daemons and agents say of themselves.
    for path in hearth.root.glob("sandboxes/**/*.log"):
        run.show(str(path.relative_to(hearth.root)), path.read_text("utf-8", "replace"))


async def test_secrets_and_payloads_are_where_they_belong_and_nowhere_else(run: Run) -> None:
    await talk(run)
    await ask_wrongly(run)
    if run.provider == "local":
        # Settings are read before anything is known of providers.
        await start_wrongly(run)
    for name in ("relay", "history", "pool", "sandbox"):
        os.kill(run.hearth.pids()[name], signal.SIGKILL)
        if name == "history":
            async with run.client(run.planted.secrets["project"]) as client:
                await run.refused("history is away", client.head(session_key(PROJECT, "talk")))
    again = await run.hearth.up()
    assert again.code == 0, again.stderr
    run.show("hearth up", again.stdout + again.stderr)
    await look(run)
    # It looked at the real ones.
    assert {"logs/pool.log", "logs/history.log", "stack.json", "metrics of pool"} <= set(run.shown)
    assert "traces" in " ".join(run.shown)
    found = {where: run.planted.found(text) - PRIVATE.get(where, set()) for where, text in run.shown.items()}
    assert {where: names for where, names in found.items() if names} == {}
    for name in PRIVATE:
        if (run.hearth.root / name).exists():
            assert (run.hearth.root / name).stat().st_mode & 0o077 == 0, name
