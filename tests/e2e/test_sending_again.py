"""`hearth send --wait`, called again under its request id: it tells of the same turn, and waits for no other."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

import hearth
from tests.support.cli import SERVICES, Hearth

pytestmark = pytest.mark.asyncio(loop_scope="session")


@pytest.fixture
def program(hearth: Hearth) -> Hearth:
    """The program; its name is that of the library too."""
    return hearth


async def test_a_turn_that_has_ended_is_shown_again(program: Hearth, tmp_path: Path) -> None:
    file = tmp_path / "plan.md"
    file.write_text("the plan")
    session, request = f"again-{uuid.uuid4().hex[:8]}", str(uuid.uuid4())
    sending = ("send", session, "remember my name is Ada", "--request-id", request, "--attach", str(file), "--wait")
    first, again = [await program.run(*sending) for _ in range(2)]
    assert (first.code, again.code) == (0, 0), first.stderr + again.stderr
    assert "your name is Ada" in first.stdout
    assert again.stdout.splitlines()[-2:] == first.stdout.splitlines()[-2:]
    log = (await program.run("history", session, "--json")).lines()
    assert [item["event"]["type"] for item in log].count("execution.started") == 1


async def test_a_turn_that_is_no_more_in_the_log_is_told(program: Hearth) -> None:
    session, request = f"again-{uuid.uuid4().hex[:8]}", str(uuid.uuid4())
    sending = ("send", session, "error something broke", "--request-id", request, "--wait")
    assert (await program.run(*sending)).code == 1
    assert (await program.run("send", session, "hello", "--wait")).code == 0
    log = (await program.run("history", session, "--json")).lines()
    ended = next(item["cursor"]["sequence"] for item in log if item["event"]["type"] == "execution.failed")
    async with hearth.Client(hearth.Addresses(**{name: program.addresses()[name] for name in SERVICES})) as client:
        await client.admin.trim(hearth.session_key("demo", session), int(ended))
    assert (await program.run(*sending)).code == 1


async def test_a_message_that_was_removed_is_not_waited_for(program: Hearth) -> None:
    session, request = f"again-{uuid.uuid4().hex[:8]}", str(uuid.uuid4())
    assert (await program.run("send", session, "sleep 60")).code == 0
    queued = (await program.run("send", session, "later", "--request-id", request, "--json")).json()
    assert (await program.run("queue", "remove", session, queued["queued"]["input_id"])).code == 0
    assert (await program.run("send", session, "later", "--request-id", request, "--wait")).code == 1
    assert (await program.run("kill", session)).code == 0
