"""What surrounds a measurement: CPU and memory from /proc, drivers of peers, the command line and its exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from benchmarks import machine, peers, workloads
from benchmarks.report import Report, Target
from benchmarks.runs import Options, Say
from hearth.cli.main import app

_BURN = "import time\nends = time.process_time() + 0.3\nwhile time.process_time() < ends: pass"


def test_cpu_of_a_child_is_ours_after_it_ended() -> None:
    with machine.measured({"me": os.getpid()}) as usage:
        subprocess.run([sys.executable, "-c", _BURN], check=True)
    assert usage.cpu["me"] >= 0.28
    assert usage.seconds >= 0.28


def test_cpu_of_a_running_child_is_counted_for_it_and_for_us() -> None:
    child = subprocess.Popen([sys.executable, "-c", f"input()\n{_BURN}\ninput()"], stdin=subprocess.PIPE)
    assert child.stdin is not None
    with machine.measured({"child": child.pid, "me": os.getpid()}) as usage:
        child.stdin.write(b"\n")
        child.stdin.flush()
        ends = time.monotonic() + 20
        # Some of it went into its start, before it was measured.
        while _used(child.pid) < 0.3 and time.monotonic() < ends:
            time.sleep(0.02)
    child.communicate(b"\n")
    assert usage.cpu["child"] >= 0.1
    # A tick of the kernel's accounting may fall between the two.
    assert usage.cpu["me"] >= usage.cpu["child"] - 1.5 / os.sysconf("SC_CLK_TCK")


def _used(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def test_cpu_of_a_stranger_is_that_of_others() -> None:
    # Its parent ends at once, so it is nobody's child here.
    orphan = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {_BURN!r}])"
    with machine.measured({}) as usage:
        subprocess.run([sys.executable, "-c", orphan], check=True)
        time.sleep(0.6)
    assert usage.others_cores * usage.seconds >= 0.2


async def test_waiting_for_a_quiet_machine() -> None:
    assert await machine.wait_until_quiet(float("inf"), 0)
    assert not await machine.wait_until_quiet(-1.0, 0)


def test_a_watched_process_may_be_gone() -> None:
    with machine.measured({"gone": 2**22 - 1}) as usage:
        pass
    assert usage.cpu["gone"] == 0


def test_memory_and_file_system() -> None:
    assert machine.resident_bytes(os.getpid()) > 1_000_000
    assert machine.filesystem_of(Path("/proc/self")) == "proc"


@pytest.mark.parametrize("workload", list(workloads.WORKLOADS))
def test_each_workload_has_peers(workload: str) -> None:
    assert peers.commands(workload, quick=True)
    assert len(peers.commands(workload, quick=False)) == len(peers.commands(workload, quick=True))


def test_figures_of_peers_are_found() -> None:
    lines: list[dict[str, object]] = [
        {"peer": "a", "workload": "w", "params": {"readers": 1}, "rate": 5},
        {"peer": "a", "workload": "w", "params": {"readers": 2}, "rate": 7},
        {"error": "it is not installed"},
    ]
    assert peers.figure(lines, "a", "w", "rate") == 5
    assert peers.figure(lines, "a", "w", "rate", readers=2) == 7
    assert peers.figure(lines, "b", "w", "rate") == float("inf")


async def test_drivers_of_peers_are_run(tmp_path: Path) -> None:
    (tmp_path / "replay.py").write_text(
        "import json, sys\n"
        "name = sys.argv[sys.argv.index('--peer') + 1]\n"
        "if name == 'postgres': sys.exit('it does not start')\n"
        "print('starting')\n"
        "print(json.dumps({'peer': name, 'workload': 'replay', 'params': {}, 'events_per_s': 5}))\n"
    )
    lines = await peers.run("replay", Options(quick=True, peers=tmp_path, peers_python=sys.executable), print)
    found = {line.get("peer"): line for line in lines}
    assert found["jetstream"]["events_per_s"] == 5
    assert found["jetstream"]["command"][:3] == ["replay.py", "--peer", "jetstream"]
    (failed,) = [line for line in lines if "error" in line]
    assert failed["error"] == "it does not start"
    assert "postgres" in failed["command"]
    assert not list(tmp_path.glob("__pycache__"))
    assert await peers.run("replay", Options(), print) == []


def reporting(report: Report, asked: list[Options]) -> object:
    async def run(options: Options, say: Say) -> Report:
        asked.append(options)
        say("working")
        return report

    return run


@pytest.mark.parametrize(
    ("report", "code"),
    [
        (Report("append", {}, targets=[Target("rate", 10, 10, "events/s")]), 0),
        (Report("append", {}, targets=[Target("rate", 9, 10, "events/s")]), 1),
        (Report("append", {}, others_cores=1.5), 2),
        (Report("append", {}, problems=["a text is wrong"]), 1),
    ],
)
def test_the_command_prints_json_and_exits(monkeypatch: pytest.MonkeyPatch, report: Report, code: int) -> None:
    asked: list[Options] = []
    monkeypatch.setitem(workloads.WORKLOADS, "append", reporting(report, asked))
    result = CliRunner().invoke(app, ["bench", "append", "--json", "--runs", "3"])
    assert result.exit_code == code, result.output
    assert json.loads(result.stdout) == report.content()
    assert asked == [Options(runs=3)]


def test_the_command_prints_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Options] = []
    report = Report("replay", {}, targets=[Target("rate", 10, 10, "events/s")])
    monkeypatch.setitem(workloads.WORKLOADS, "replay", reporting(report, asked))
    arguments = ["--quick", "--large", "--peers", str(tmp_path), "--peers-python", "python9", "--wait", "5"]
    result = CliRunner().invoke(app, ["bench", "replay", *arguments])
    assert result.exit_code == 0
    assert "replay: targets" in result.stdout
    assert "working" in result.stderr
    assert asked == [Options(1, quick=True, large=True, patience=5, peers=tmp_path, peers_python="python9")]


def test_a_directory_of_peers_must_be_there() -> None:
    assert CliRunner().invoke(app, ["bench", "replay", "--peers", "/nowhere"]).exit_code == 2
