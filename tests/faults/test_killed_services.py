"""kill -9 of one service while turns stream and a producer logs its acknowledgements: nothing acknowledged is lost.

After each kill and restart: every acknowledged event is in the history once and at its sequence, logs are contiguous,
each execution has one ending, the turn that streamed meanwhile ended as it must, and the next Send runs.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.cli import Hearth, running
from tests.support.exhaustive import sampled

ENDINGS = {"execution.completed", "execution.stopped", "execution.failed", "execution.lost", "execution.paused"}
SESSIONS = 4


@pytest.fixture
async def hearth(scratch: Path) -> AsyncIterator[Hearth]:
    async with running(scratch / ".hearth") as program:
        yield program


class AckProducer:
    """The logging producer as a process."""

    def __init__(self, hearth: Hearth, log: Path) -> None:
        self._hearth = hearth
        self.log = log
        self.process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        where = self._hearth.addresses()
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "tests.support.ack_producer", "--history", where["history"], "--relay", where["relay"]),
            *("--log", str(self.log), "--sessions", str(SESSIONS)),
        )

    def acknowledged(self) -> list[dict[str, Any]]:
        if not self.log.exists():
            return []
        return [json.loads(line) for line in self.log.read_text().splitlines() if line.endswith("}")]

    async def until(self, count: int) -> None:
        assert self.process is not None
        async with asyncio.timeout(60):
            while len(self.acknowledged()) < count:
                assert self.process.returncode is None, "the producer died"
                await asyncio.sleep(0.05)

    async def finish(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(60):
            assert await self.process.wait() == 0


async def log_of(hearth: Hearth, session: str, project: str) -> list[dict[str, Any]]:
    return (await hearth.run("history", session, "--project", project, "--json")).lines()


def check_log(log: list[dict[str, Any]]) -> None:
    assert [int(item["cursor"]["sequence"]) for item in log] == list(range(1, len(log) + 1))
    ids = [item["event"]["event_id"] for item in log]
    assert len(ids) == len(set(ids))
    endings = [item["event"]["execution_id"] for item in log if item["event"]["type"] in ENDINGS]
    started = [item["event"]["execution_id"] for item in log if item["event"]["type"] == "execution.started"]
    assert sorted(endings) == sorted(started)
    assert len(set(endings)) == len(endings)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("victim", sampled(["pool", "history", "relay"], every=3))
async def test_nothing_acknowledged_is_lost(hearth: Hearth, tmp_path: Path, victim: str) -> None:
    producer = AckProducer(hearth, tmp_path / "acks.jsonl")
    await producer.start()
    await producer.until(200)
    async with hearth.watching("turn") as reader:
        sent = (await hearth.run("send", "turn", "stream 400 words at 60/s", "--json")).json()
        execution = sent["started"]["execution"]["execution_id"]
        await reader.until(lambda items: sum("frame" in item for item in items) >= 10)

        killed = psutil.Process(hearth.pids()[victim])
        killed.send_signal(signal.SIGKILL)
        before = len(producer.acknowledged())
        restarted = await hearth.up()
        assert restarted.code == 0, restarted.stderr
        await producer.until(before + 200)

        def ending_of(items: list[dict[str, Any]]) -> list[str]:
            events = [item["event"]["event"] for item in items if "event" in item]
            return [e["type"] for e in events if e["execution_id"] == execution and e["type"] in ENDINGS]

        await reader.until(ending_of, seconds=90)
        assert ending_of(reader.items) == ["execution.lost" if victim == "pool" else "execution.completed"]
        assert (await hearth.run("send", "turn", "hello", "--wait", seconds=90)).code == 0
        turn_log = await log_of(hearth, "turn", "demo")
        seen = [item["event"] for item in reader.items if "event" in item]
        assert seen == turn_log[: len(seen)]
    check_log(turn_log)

    await producer.finish()
    acknowledged = producer.acknowledged()
    for number in range(SESSIONS):
        log = await log_of(hearth, f"acks-{number}", "acks")
        check_log(log)
        at = {item["event"]["event_id"]: int(item["cursor"]["sequence"]) for item in log}
        for line in acknowledged:
            if line["session"] == f"acks-{number}":
                assert line["outcome"] in {"APPENDED", "DUPLICATE"}
                assert at[line["event_id"]] == line["sequence"]
