"""Each workload of the benchmarks, very small, on real processes: figures of the right shape, and nothing wrong.

Nothing here asserts a time or a rate. Where a result is falsified on purpose, the benchmark must say so.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from benchmarks import append, fanout, idle, replay, sessions, steady
from benchmarks.clients import ClientError, clients
from benchmarks.report import Report
from benchmarks.rig import Rig, Service
from benchmarks.runs import Part


@dataclass(frozen=True, slots=True)
class Bench:
    """What the workloads of this module share."""

    rig: Rig
    history: Service
    relay: Service


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    """Stores and services. Nothing of them belongs to one event loop."""
    rig = Rig()

    async def start() -> Bench:
        await rig.__aenter__()
        history = await rig.history()
        return Bench(rig, history, await rig.relay(history))

    try:
        yield asyncio.run(start())
    finally:
        asyncio.run(rig.__aexit__(None, None, None))
    assert not rig.directory.exists()


def check_part(part: Part, *expected: str) -> None:
    """Nothing is wrong, and the figures are finite numbers."""
    assert part.problems == []
    assert set(expected) <= set(part.figures)
    assert all(math.isfinite(value) for value in part.figures.values()), part.figures
    assert part.others_cores >= 0


@pytest.mark.parametrize(("name", "callers", "streams"), [("spread", 4, 4), ("hot", 4, 1)])
async def test_append(bench: Bench, name: str, callers: int, streams: int) -> None:
    plan = append.Plan(callers, streams, 0.3, name)
    part = await append.measure_append(bench.rig, bench.history, plan, "")
    check_part(part, "events_per_s", "p50_ms", "p99_ms", "history_us", "postgres_us", "client_us", "events_per_request")
    assert part.figures["events_per_s"] > 0


async def test_one_event_for_each_request(bench: Bench) -> None:
    plan = append.Plan(4, 1, 0.3, "alone", one_by_one=True)
    part = await append.measure_append(bench.rig, bench.history, plan, "")
    check_part(part)
    assert part.figures["events_per_request"] == 1


async def test_replay(bench: Bench) -> None:
    loaded = await replay.write(bench.history, replay.LONG, 300)
    assert sorted(loaded.ids) == list(range(1, 301))
    await replay.write(bench.history, replay.USUAL, 50)
    await replay.fill(bench.rig, bench.rig.dsn, 20_000)
    assert await bench.rig.execute(bench.rig.dsn, "SELECT count(*) FROM history.events") >= 20_350
    async with clients(("benchmarks.replay:read",)) as (reader,):
        assert await replay.check(reader, bench.history, replay.LONG, loaded) == []
        part = await replay.measure_long(bench.rig, reader, bench.history, 300)
        check_part(part, "events_per_s", "first_chunk_ms")
        part = await replay.measure_stores(reader, bench.history, bench.history, 50)
        check_part(part, "history_events_per_s", "history_first_chunk_ms")
        part = await replay.measure_long(bench.rig, reader, bench.history, 301)
        assert part.problems == ["300 events came, 301 were written"]


async def test_a_falsified_log_is_seen(bench: Bench) -> None:
    loaded = await replay.write(bench.history, "falsified", 20)
    of_log = "log = (SELECT id FROM history.logs WHERE session = 'falsified')"
    other = "(SELECT body FROM history.events WHERE sequence = 4 AND " + of_log + ")"
    async with clients(("benchmarks.replay:read",)) as (reader,):
        assert await replay.check(reader, bench.history, "falsified", loaded) == []
        await bench.rig.execute(
            bench.rig.dsn, f"UPDATE history.events SET body = {other} WHERE sequence = 5 AND {of_log}"
        )
        (problem,) = await replay.check(reader, bench.history, "falsified", loaded)
        assert problem == "falsified: 1 events are not the acknowledged ones, the first at 5"
        await bench.rig.execute(bench.rig.dsn, f"DELETE FROM history.events WHERE sequence = 7 AND {of_log}")
        problems = await replay.check(reader, bench.history, "falsified", loaded)
        assert any("DATA_LOSS" in problem for problem in problems), problems


async def test_falsified_content_is_seen(bench: Bench) -> None:
    loaded = await replay.write(bench.history, "content", 20)
    async with clients(("benchmarks.replay:read",)) as (reader,):
        changed = replay.Loaded(loaded.ids, "0" * 64)
        (problem,) = await replay.check(reader, bench.history, "content", changed)
        assert problem == "content: contents differ from those written"


@pytest.mark.parametrize("shape", [steady.Shape(3, 1, 50, 0.4), steady.Shape(1, 6, 50, 0.4, 2)])
async def test_steady_frames(bench: Bench, shape: steady.Shape) -> None:
    part = await steady.measure(bench.rig, bench.history, bench.relay, shape, "", f"steady{shape.readers}")
    check_part(part, "deliveries_per_s", "p50_ms", "p99_ms", "relay_us", "readers_us", "gaps", "publisher_late_p99_ms")
    assert part.figures["deliveries_per_s"] > 0


async def test_a_burst(bench: Bench) -> None:
    part = await fanout.measure_burst(bench.rig, bench.history, bench.relay, 200, 4, "burst")
    check_part(part, "burst_deliveries_per_s", "burst_joined_share", "burst_gaps", "burst_relay_us")


@pytest.mark.exhaustive
async def test_quiet_readers_come_back(bench: Bench) -> None:
    part = await idle.measure(bench.history, bench.relay, 20)
    check_part(part, "idle_kib", "connect_s", "restart_back_s", "kill_back_s")
    assert part.figures["restart_refused"] == part.figures["kill_refused"] == 0


async def test_a_client_that_fails_is_heard_of(bench: Bench) -> None:
    async with clients(("benchmarks.append:callers", bench.history.address, None)) as (client,):
        with pytest.raises(ClientError, match="AttributeError"):
            await client.receive()


async def test_a_report_of_real_figures(bench: Bench) -> None:
    part = await steady.measure(bench.rig, bench.history, bench.relay, steady.Shape(1, 1, 50, 0.3), "", "report")
    report = Report("sessions", await bench.rig.description(), part.figures, targets=sessions.targets(part.figures))
    content = json.loads(json.dumps(report.content()))
    assert content["params"]["postgres"]["fsync"] == "on"
    assert content["params"]["postgres"]["synchronous_commit"] == "on"
    assert [set(target) for target in content["targets"]] == [{"name", "value", "target", "unit", "ok"}] * 4


def test_what_a_killed_benchmark_left_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    left = tmp_path / "hearth-bench-4194303-x"
    left.mkdir()
    alive = tmp_path / "hearth-bench-1-x"
    alive.mkdir()
    rig = Rig()
    assert not left.exists()
    assert alive.exists()
    rig.directory.rmdir()
