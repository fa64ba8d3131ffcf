"""The witness of daemons sees red: two of one session at once are told; one after the other, or of two, are not."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.processes import MARKER, marker
from tests.support.witnessed_agentd import VARIABLE, Witness

TESTIFY = (
    "import os, sys; from pathlib import Path; from tests.support.witnessed_agentd import testify;"
    f" testify(Path(os.environ['{VARIABLE}'])); print('done', flush=True); sys.stdin.read()"
)


@contextmanager
def daemon(witness: Witness, session: str, sandbox_id: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that testifies as a daemon does, and lives until the end of the block."""
    environment = {**os.environ, **witness.environment(), MARKER: marker()}
    environment |= {"HOME": f"/workspaces/{session}/.home", "HEARTH_SANDBOX_ID": sandbox_id}
    command = [sys.executable, "-c", TESTIFY]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"done\n"
        try:
            yield process
        finally:
            process.kill()
            process.wait(10)


def test_two_at_once_are_seen(tmp_path: Path) -> None:
    witness = Witness(tmp_path)
    with daemon(witness, "s", "one"), daemon(witness, "s", "two"):
        assert [one.sandbox_id for one in witness.alive()] == ["one"]
    assert [one.second for one in witness.started()] == [False, True]
    with pytest.raises(AssertionError):
        witness.check()
    assert witness.alive() == []


def test_one_that_was_killed_and_others_are_no_seconds(tmp_path: Path) -> None:
    witness = Witness(tmp_path)
    with daemon(witness, "s", "one"), daemon(witness, "other", "two"):
        assert sorted(one.sandbox_id for one in witness.alive()) == ["one", "two"]
    with daemon(witness, "s", "three"):
        assert [one.sandbox_id for one in witness.alive()] == ["three"]
    witness.check()
