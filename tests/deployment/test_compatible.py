"""The release before this one understands what this one sends, and runs on the tables that this one makes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests.deployment import released
from tests.deployment.compose import ROOT
from tests.support.cli import PROGRAM

BUF, SQUAWK = PROGRAM.with_name("buf"), PROGRAM.with_name("squawk")

TAKES_AWAY = {
    "a column": "ALTER TABLE pool.session DROP COLUMN epoch;",
    "a table": "DROP TABLE pool.gate;",
    "a name": "ALTER TABLE pool.session RENAME COLUMN epoch TO age;",
    "a type": "ALTER TABLE pool.session ALTER COLUMN epoch TYPE text;",
    "leave it out": "ALTER TABLE pool.session ADD COLUMN flavour text NOT NULL;",
    "nothing in it": "ALTER TABLE pool.session ALTER COLUMN holder SET NOT NULL;",
}


@pytest.fixture
def old_contracts(tmp_path: Path) -> Path:
    found = tmp_path / "released.binpb"
    found.write_bytes(released.contracts(released.unpacked(tmp_path / "released")))
    return found


def compared(protos: Path, old: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([BUF, "breaking", "--against", old], cwd=protos, capture_output=True, text=True, check=False)


def checked(*revisions: Path) -> subprocess.CompletedProcess[str]:
    command: list[str | Path] = [SQUAWK, "--config", ROOT / ".squawk.toml", "--reporter", "gcc", *revisions]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_contracts_only_grow(old_contracts: Path) -> None:
    done = compared(ROOT, old_contracts)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_contract_that_lost_a_field_is_seen(old_contracts: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    for path in (ROOT / "protos").rglob("*.proto"):
        target = broken / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(path.read_text().replace("string request_id = ", "string other_name = "))
    (broken / "buf.yaml").write_text((ROOT / "buf.yaml").read_text())
    done = compared(broken, old_contracts)
    assert done.returncode != 0
    assert "request_id" in done.stdout


def test_schemas_only_grow() -> None:
    revisions = sorted(ROOT.glob("services/*/migrations/versions/*.sql"))
    assert len(revisions) >= 9
    done = checked(*revisions)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("what", TAKES_AWAY)
def test_a_revision_that_takes_away_is_seen(what: str, tmp_path: Path) -> None:
    revision = tmp_path / "0099_takes.sql"
    revision.write_text(TAKES_AWAY[what])
    assert checked(revision).returncode == 1
