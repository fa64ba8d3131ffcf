"""Crash points: off by default, at the named passage when on, and none that nobody declared."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.chassis import crashpoints

PROGRAM = """
from services.chassis import crashpoints
crashpoint = crashpoints.declare("some", "one", "two")
crashpoints.announce("some")
for number in range(5):
    crashpoint("one")
    print(number, flush=True)
crashpoint("two")
"""
# The same, one passage for each line that it reads.
ASKING = """
from services.chassis import crashpoints
crashpoint = crashpoints.declare("some", "one", "other")
while input() == "":
    crashpoint("one")
    print(flush=True)
"""


def run(value: str | None) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **({crashpoints.VARIABLE: value} if value else {})}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, timeout=30, check=False
    )


def test_off_they_do_nothing() -> None:
    done = run(None)
    assert (done.returncode, done.stdout, done.stderr) == (0, "0\n1\n2\n3\n4\n", "")


@pytest.mark.parametrize(("value", "lines"), [("some.one", 0), ("some.one@3", 2), ("other.one,some.two@1=kill", 5)])
def test_on_the_process_dies_at_the_named_passage(value: str, lines: int) -> None:
    done = run(value)
    assert done.returncode == -signal.SIGKILL
    assert len(done.stdout.splitlines()) == lines
    assert "crash point reached: some." in done.stderr


def test_a_passage_that_never_comes_does_nothing_and_it_is_said_that_it_may() -> None:
    done = run("some.one@6,other.one")
    assert done.returncode == 0
    assert "crash points are armed" in done.stderr


def test_a_point_that_nobody_declared_fails_the_start() -> None:
    done = run("some.three")
    assert done.returncode == 1
    assert "there is no point some.three" in done.stderr
    assert done.stdout == ""


def test_it_can_freeze_instead() -> None:
    environment = {**os.environ, crashpoints.VARIABLE: "some.one@2=stop"}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], env=environment, stdout=subprocess.PIPE) as process:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        process.send_signal(signal.SIGCONT)
        assert process.wait(30) == 0


@pytest.mark.parametrize("value", ["@1", "a@0", "a@x", "a=explode", "a@1@2"])
def test_what_has_another_form_is_refused_at_the_start(value: str) -> None:
    with pytest.raises(ValueError, match=crashpoints.VARIABLE):
        crashpoints.parse(value)
    assert run(value).returncode == 1


def test_points_are_declared_once_and_enumerable() -> None:
    point = crashpoints.declare("tests", "a", "b")
    assert crashpoints.declared("tests") == ("tests.a", "tests.b")
    assert crashpoints.declared("nobody") == ()
    with pytest.raises(ValueError, match="twice"):
        crashpoints.declare("tests", "b")
    with pytest.raises(KeyError):
        point("c")


def test_a_file_aims_at_a_process_that_runs(tmp_path: Path) -> None:
    plan = tmp_path / "plan"
    environment = {**os.environ, crashpoints.VARIABLE: f"@{plan}"}
    program = [sys.executable, "-c", ASKING]
    with subprocess.Popen(program, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        asks, answers = process.stdin, process.stdout
        assert asks is not None
        assert answers is not None

        def passes() -> bool:
            asks.write(b"\n")
            asks.flush()
            return bool(answers.readline())

        assert passes()
        for text in ("some.other", "some.one@3"):
            (tmp_path / "draft").write_text(text)
            (tmp_path / "draft").rename(plan)
            # Those that were counted before do not count.
            assert passes()
            assert passes()
        plan.unlink()
        assert passes()
        plan.write_text("some.one")
        assert not passes()
        assert process.wait(30) == -signal.SIGKILL
