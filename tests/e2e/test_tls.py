"""A stack that speaks TLS and asks for tokens, from the outside: every command finds its certificates, programs and
grpcurl get through with them, and who comes without or with wrong ones is told what to do."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import shlex
import signal
import ssl
import uuid
from collections.abc import AsyncIterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

import hearth
from hearth.certificates import Authority, ends_at, write_pair
from hearth.embedded.certificates import HOSTS
from hearth.errors import Unauthenticated, Unavailable
from hearth.tls import Tls, read_pair
from tests.e2e.test_metrics import pages
from tests.e2e.test_one_trace import SEND, SUBSCRIBE, above, named
from tests.support.caller import SERVICE, calling
from tests.support.certificates import Certificates
from tests.support.cli import PROGRAM, SERVICES, Finished, Hearth, running
from tests.support.servers import Servers
from tests.support.waiting import eventually

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def tokens(servers: Servers) -> dict[str, str]:
    """What the services and the program are told: a token of all projects that may do everything."""
    token, file = uuid.uuid4().hex, servers.scratch() / "tokens.json"

    scopes = ["read", "run", "admin", "internal"]
    digest = hashlib.sha256(token.encode()).hexdigest()
    file.write_text(json.dumps({digest: {"name": "all", "project": "*", "scopes": scopes}}))
    return {"HEARTH_AUTH_FILE": str(file), "HEARTH_TOKEN": token}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(servers: Servers, tokens: dict[str, str]) -> AsyncIterator[Hearth]:
    async with running(servers.scratch() / ".hearth", tokens, ["--tls"]) as found:
        yield found


def tls_of(stack: Hearth) -> Tls:
    return Tls.of_files(stack.root / "tls" / "ca.pem")


def client_of(stack: Hearth, **changes: object) -> hearth.Client:
    where = stack.addresses()
    given = {"token": stack.environment["HEARTH_TOKEN"], "tls": tls_of(stack), **changes}
    return hearth.Client(hearth.Addresses(**{name: where[name] for name in SERVICES}), **given)  # type: ignore[arg-type]


async def shell(line: str, **environment: str) -> Finished:
    process = await asyncio.create_subprocess_exec(
        *shlex.split(line),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={"PATH": str(PROGRAM.parent), **environment},
    )
    async with asyncio.timeout(60):
        stdout, stderr = await process.communicate()
    return Finished(process.returncode or 0, stdout.decode(), stderr.decode())


def new_session() -> str:
    return f"tls-{uuid.uuid4().hex[:8]}"


async def test_a_turn_through_the_client_is_one_trace(stack: Hearth) -> None:
    session = new_session()
    async with (
        stack.watching(session, "--tail") as reader,
        calling(stack, token=stack.environment["HEARTH_TOKEN"], tls=tls_of(stack)) as caller,
    ):
        await reader.until(lambda items: any("ready" in item for item in items))
        trace = await caller.traced(await caller.send(session, "hello"), "turn.park", "process hearth:live")
        assert set(trace.services) == {SERVICE, "pool", "sandbox", "history", "relay"}
        (turn,) = named(trace, "turn")
        assert above(trace, turn) == [SEND, "POST /chat"]
    await eventually(lambda: SUBSCRIBE in (stack.root / "traces" / "relay.jsonl").read_text())


async def test_every_command_finds_the_certificates_of_the_stack(stack: Hearth) -> None:
    session = new_session()
    for arguments in (
        ["status"],
        ["send", session, "hello", "--wait"],
        ["history", session],
        ["sessions"],
        ["sessions", session],
        ["queue", "list", session],
        ["gates", session],
        ["sandboxes", "list"],
        ["sandboxes", "usage"],
        ["credentials", "list"],
        ["pool", "entries"],
        ["pool", "replicas"],
        ["pool", "stats"],
        ["doctor"],
    ):
        done = await stack.run(*arguments)
        assert "No such" not in done.stderr, arguments
        assert done.code == 0, (arguments, done.stdout, done.stderr)
    said = await stack.run("chat", session, stdin="again\n")
    assert "You said: again" in said.stdout, said.stderr
    health = await stack.run("health", stack.addresses()["relay"], "--tls-ca", str(stack.root / "tls" / "ca.pem"))
    assert health.code == 0, health.stderr


async def test_each_service_tells_when_its_certificate_ends(stack: Hearth) -> None:
    files = Path(json.loads((stack.root / "stack.json").read_text())["tls"]["certificate"])
    ends = ends_at(read_pair(files, files.with_suffix(".key"))).timestamp()
    for name, page in (await pages(stack)).items():
        assert page.value("hearth_tls_certificate_ends_seconds") == ends, name


async def test_lines_that_up_prints_work_as_they_are(stack: Hearth) -> None:
    printed = (await stack.run("up")).stdout.splitlines()
    token = f"-H 'authorization: Bearer {stack.environment['HEARTH_TOKEN']}' -max-time 5"
    lines = [line.strip().replace("grpcurl", f"grpcurl {token}", 1) for line in printed if " grpcurl " in line]
    assert len(lines) == 3
    listed, sent, watched = [await shell(line) for line in lines]
    assert "hearth.session.v1.SessionService" in listed.stdout, listed.stderr
    assert json.loads(sent.stdout)["started"], sent.stderr
    assert '"ready"' in watched.stdout, watched.stderr
    exported = dict(line.strip().removeprefix("export ").split("=") for line in printed if "export " in line)
    assert exported == {"HEARTH_TLS_CA_FILE": str(stack.root / "tls" / "ca.pem")}
    plain = await shell(f"grpcurl -plaintext -max-time 5 {stack.addresses()['pool']} list")
    assert plain.code != 0


async def test_who_comes_without_or_with_wrong_roots_is_told_what_to_do(stack: Hearth, tmp_path: Path) -> None:
    where = {f"HEARTH_{name.upper()}_ADDRESS": address for name, address in stack.addresses().items()}
    token = {"HEARTH_TOKEN": stack.environment["HEARTH_TOKEN"]}
    plain = await Hearth(tmp_path, where | token).run("sessions")
    assert plain.code == 3
    assert "set HEARTH_TLS_CA_FILE" in plain.stderr
    strange = Certificates(tmp_path).ca
    wrong = await Hearth(tmp_path, where | token | {"HEARTH_TLS_CA_FILE": str(strange)}).run("sessions")
    assert wrong.code == 3
    assert "not signed by the roots in HEARTH_TLS_CA_FILE" in wrong.stderr
    missing = await Hearth(tmp_path, where | token | {"HEARTH_TLS_CA_FILE": str(tmp_path / "none")}).run("sessions")
    assert missing.code == 2
    assert "cannot be read" in missing.stderr
    asked = await stack.run("health", stack.addresses()["pool"])
    assert asked.code == 3
    assert "set HEARTH_TLS_CA_FILE" in asked.stderr
    async with client_of(stack, tls=None) as client:
        with pytest.raises(Unavailable):
            await client.get_session(hearth.session_key("demo", "none"))
    async with client_of(stack, token="") as client:
        with pytest.raises(Unauthenticated):
            await client.get_session(hearth.session_key("demo", "none"))


async def test_a_watcher_lives_through_new_certificates_and_a_restart_of_the_relay(stack: Hearth) -> None:
    key = hearth.session_key("demo", new_session())
    sequences: list[int] = []
    async with client_of(stack) as client:
        watch = client.watch(key, events_only=True)

        async def read() -> None:
            async for item in watch:
                if item.HasField("event"):
                    sequences.append(item.event.cursor.sequence)

        async def turn() -> None:
            sent = await client.send(key, "hello")
            async for _ in client.follow(key, until_ended=sent.started.execution.execution_id):
                pass
            head = (await client.head(key)).head.sequence
            await eventually(lambda: sequences[-1:] == [head])

        reading = asyncio.create_task(read())
        try:
            await turn()
            directory = stack.root / "tls"
            authority = Authority.read(directory / "ca.pem", directory / "ca.key")
            fresh = authority.issue("renewed", HOSTS, datetime.now(UTC), timedelta(days=90))
            write_pair(fresh, directory / "stack.pem", directory / "stack.key")
            host, port = stack.addresses()["relay"].split(":")
            assert await asyncio.to_thread(_shown, host, int(port), directory / "ca.pem") == fresh.certificate_chain
            await turn()
            assert watch.reconnects == 0
            psutil.Process(stack.pids()["relay"]).send_signal(signal.SIGKILL)
            again = await stack.up()
            assert again.json()["tls"]["ca"] == str(directory / "ca.pem")
            await turn()
            assert watch.reconnects > 0
        finally:
            reading.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await reading
    assert sequences == list(range(1, len(sequences) + 1))


async def test_a_running_stack_does_not_change_what_it_speaks(stack: Hearth) -> None:
    refused = await stack.up("--mtls")
    assert refused.code == 1
    assert "hearth down" in refused.stderr
    assert (await stack.up("--tls")).json()["started"] is False


async def test_callers_show_a_certificate_where_it_is_asked_for(scratch: Path, tokens: dict[str, str]) -> None:
    async with running(scratch / ".hearth", tokens, ["--mtls", "--pools", "2"]) as stack:
        session = new_session()
        done = await stack.run("send", session, "hello", "--wait")
        assert done.code == 0, done.stderr
        # Each replica is asked by itself.
        assert (await stack.run("pool", "entries")).code == 0
        looked = await stack.run("doctor", "--json")
        assert looked.code == 0, looked.stderr
        assert all(7 < service["certificate_days"] <= 90 for service in json.loads(looked.stdout)["services"])
        files = {name: stack.root / "tls" / name for name in ("ca.pem", "stack.pem", "stack.key")}
        async with client_of(stack) as client:
            with pytest.raises(Unavailable):
                await client.get_session(hearth.session_key("demo", session))
        mine = Tls.of_files(files["ca.pem"], certificate_file=files["stack.pem"], key_file=files["stack.key"])
        async with client_of(stack, tls=mine) as client:
            assert (await client.get_session(hearth.session_key("demo", session))).session.session == session
        without = await stack.run("health", stack.addresses()["pool"], "--tls-ca", str(files["ca.pem"]))
        assert without.code == 3
        assert "HEARTH_TLS_CERTIFICATE_FILE" in without.stderr
        printed = await stack.run("up", "--pools", "2")
        assert printed.code == 0, printed.stderr
        (line,) = (it.strip() for it in printed.stdout.splitlines() if it.endswith(" list"))
        assert "hearth.pool.v1.PoolService" in (await shell(line)).stdout
        assert (await shell(line.replace("-key", "-max-time 5 -key").replace("-cert", "-cacert"))).code != 0


async def test_certificates_of_the_user_are_taken(scratch: Path) -> None:
    certificates = Certificates(scratch)
    files = certificates.issue("mine", hosts=("hearth.test",))
    given = {
        "HEARTH_TLS_CERTIFICATE_FILE": str(files.certificate),
        "HEARTH_TLS_KEY_FILE": str(files.key),
        "HEARTH_TLS_CA_FILE": str(certificates.ca),
        "HEARTH_TLS_SERVER_NAME": "hearth.test",
    }
    async with running(scratch / ".hearth", given) as stack:
        bare = Hearth(stack.root)
        assert (await bare.run("send", new_session(), "hello", "--wait")).code == 0
        assert (await bare.run("status")).code == 0


def _shown(host: str, port: int, ca: Path) -> bytes:
    return ssl.get_server_certificate((host, port), ca_certs=str(ca)).encode()
