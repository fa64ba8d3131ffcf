"""`hearth credentials`, and files given to `send` and `chat`: values come from stdin or a file and show nowhere."""

from __future__ import annotations

import hashlib
import stat
import uuid
from pathlib import Path

import pytest

from hearth.cli.credentials import KEY_BYTES
from services.pool.sealing import parse_keys
from tests.support.cli import Hearth

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_credential_reaches_the_agent_of_a_chat(hearth: Hearth) -> None:
    name, value = f"key-{uuid.uuid4().hex[:8]}", f"sk-{uuid.uuid4().hex}"
    stored = await hearth.run("credentials", "put", name, "--expires-in", "48", "--json", stdin=f"{value}\n")
    assert stored.json()["name"] == name
    listed = await hearth.run("credentials", "list")
    assert name in listed.stdout
    assert "ends" in listed.stdout
    digest = hashlib.sha256(value.encode()).hexdigest()
    said = await hearth.run(
        *("chat", f"chat-{name}", "--json", "--credential", f"{name}=MODEL_KEY"),
        stdin='run printf %s "$MODEL_KEY" | sha256sum\n',
    )
    outputs = [
        line["event"]["event"].get("tool_completed", {}).get("output", "") for line in said.lines() if "event" in line
    ]
    assert any(digest in output for output in outputs)
    assert value not in stored.stdout + listed.stdout + said.stdout
    gone = await hearth.run("credentials", "delete", name)
    assert gone.code == 0
    assert name not in (await hearth.run("credentials", "list")).stdout
    refused = await hearth.run("send", f"chat-{name}", "hello")
    assert refused.code == 4
    assert "CREDENTIAL_NOT_FOUND" in refused.stderr
    assert name in refused.stderr


async def test_wrong_use_is_told(hearth: Hearth) -> None:
    wrong = await hearth.run("send", "nobody", "hello", "--credential", "name")
    assert wrong.code != 0
    assert "NAME=VARIABLE" in wrong.stderr
    empty = await hearth.run("credentials", "put", "empty", stdin="\n")
    assert empty.code == 4
    assert "value" in empty.stderr


async def test_a_key_is_made_and_the_stack_has_one_of_its_own(hearth: Hearth) -> None:
    printed = await hearth.run("credentials", "key")
    (key,) = parse_keys(printed.stdout.strip())
    assert len(key) == KEY_BYTES
    path = hearth.root / "secret.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert parse_keys(path.read_text().strip()) != [key]


async def test_a_file_goes_with_a_message(hearth: Hearth, tmp_path: Path) -> None:
    file, session = tmp_path / "plan.md", f"file-{uuid.uuid4().hex[:8]}"
    file.write_text("# the plan")
    said = await hearth.run("chat", session, "--json", "--attach", str(file), stdin="hello\nhello\n")
    events = [line["event"]["event"] for line in said.lines() if "event" in line]
    asked = [
        event["message_completed"] for event in events if event.get("message_completed", {}).get("role") == "ROLE_USER"
    ]
    first, second = asked
    attachment = first["content"][1]["attachment"]
    assert (attachment["name"], attachment["media_type"]) == ("plan.md", "text/markdown")
    assert attachment["digest"] == hashlib.sha256(b"# the plan").hexdigest()
    assert len(second["content"]) == 1
    path = f".hearth/attachments/{attachment['attachment_id']}/plan.md"
    sent = await hearth.run("send", session, f"read {path}", "--attach", str(file), "--wait")
    assert sent.code == 0, sent.stderr
    assert "# the plan" in sent.stdout
