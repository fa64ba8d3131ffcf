"""One call through two processes and their database is one trace; polls and health checks leave none."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from aiohttp import web

from hearth.history.v1 import history_service_pb2, history_service_pb2_grpc
from services.chassis import spans as spans_module
from tests.conftest import StartService

SAMPLE = "tests.support.sample"
HEADS = "hearth.history.v1.HistoryService/GetHeads"
SNAPSHOT = "hearth.history.v1.HistoryService/GetSnapshot"
EVENTS = "hearth.history.v1.HistoryService/StreamEvents"
CALLER_TRACE = "0af7651916cd43dd8448eb211c80319c"
TRACEPARENT = f"00-{CALLER_TRACE}-b7ad6b7169203331-01"


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def env(postgres_dsn: str, valkey_url: str, scratch: Path) -> dict[str, str]:
    return {
        "HEARTH_POSTGRES_DSN": postgres_dsn,
        "HEARTH_VALKEY_URL": valkey_url,
        "HEARTH_TRACE_FILE": str(scratch / "spans.jsonl"),
        "HEARTH_SHUTDOWN_GRACE": "4",
    }


async def test_one_call_is_one_trace(start_service: StartService, env: dict[str, str], scratch: Path) -> None:
    second = await start_service(SAMPLE, **env)
    first = await start_service(SAMPLE, **env, HEARTH_NEXT=second.address)
    async with grpc.aio.insecure_channel(first.address) as channel:
        stub = history_service_pb2_grpc.HistoryServiceStub(channel)
        await stub.GetHeads(history_service_pb2.GetHeadsRequest(), metadata=[("traceparent", TRACEPARENT)])
        # Without a context of the caller: a trace of its own.
        await stub.GetHeads(history_service_pb2.GetHeadsRequest())
    log = first.log()
    await first.terminate()
    await second.terminate()
    spans = read(scratch / "spans.jsonl")
    traced = [span for span in spans if span["trace_id"] == CALLER_TRACE]
    by_id = {span["span_id"]: span for span in traced}
    (root,) = (span for span in traced if span["parent_id"] not in by_id)
    assert (root["name"], root["kind"], root["parent_id"]) == (HEADS, "SERVER", "b7ad6b7169203331")
    assert sorted((span["name"], span["kind"]) for span in traced) == [
        ("SET", "CLIENT"),
        ("SET", "CLIENT"),
        (HEADS, "CLIENT"),
        (HEADS, "SERVER"),
        (HEADS, "SERVER"),
        # A statement by the name that it has in our files.
        ("visited", "CLIENT"),
        ("visited", "CLIENT"),
    ]
    # Never what was put in.
    assert "secret" not in (scratch / "spans.jsonl").read_text()
    assert len({span["instance"] for span in traced}) == 2
    assert {span["attributes"].get("db.system.name") for span in traced} == {None, "postgresql", "redis"}
    assert {span["attributes"].get("rpc.response.status_code") for span in traced if span["name"] == HEADS} == {"OK"}
    others = [span for span in spans if span["trace_id"] != CALLER_TRACE and span["name"] == HEADS]
    assert len({span["trace_id"] for span in others}) == 1
    assert f'"trace_id": "{CALLER_TRACE}"' in log


async def test_the_trace_goes_into_http_and_its_query_stays_out(
    start_service: StartService, env: dict[str, str], scratch: Path
) -> None:
    seen: list[str] = []

    async def page(request: web.Request) -> web.Response:
        seen.append(request.headers.get("traceparent", ""))
        return web.Response(text="ok")

    app = web.Application()
    app.router.add_get("/page", page)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        port = runner.addresses[0][1]
        sample = await start_service(
            SAMPLE, **env, HEARTH_PAGE=f"http://user:geheim@127.0.0.1:{port}/page?token=geheim"
        )
        async with grpc.aio.insecure_channel(sample.address) as channel:
            stub = history_service_pb2_grpc.HistoryServiceStub(channel)
            await stub.GetHeads(history_service_pb2.GetHeadsRequest(), metadata=[("traceparent", TRACEPARENT)])
        await sample.terminate()
    finally:
        await runner.cleanup()
    assert [header.split("-")[1] for header in seen] == [CALLER_TRACE]
    (span,) = (span for span in read(scratch / "spans.jsonl") if span["span_id"] == seen[0].split("-")[2])
    assert span["attributes"]["url.full"] == f"http://127.0.0.1:{port}/page"
    assert "geheim" not in (scratch / "spans.jsonl").read_text()


async def test_polls_health_and_reflection_leave_nothing(
    start_service: StartService, env: dict[str, str], scratch: Path
) -> None:
    sample = await start_service(SAMPLE, **env)
    await asyncio.sleep(1.5)
    await sample.terminate()
    spans = read(scratch / "spans.jsonl")
    ids = {span["span_id"] for span in spans}
    # The sample's sweep is a span that it asked for, with one query below it; its bare query is a poll.
    assert {span["name"] for span in spans} <= {"sweep", "SELECT"}
    assert all(span["parent_id"] in ids for span in spans if span["name"] == "SELECT")


async def test_a_cancelled_call_leaves_no_orphan(
    start_service: StartService, env: dict[str, str], scratch: Path
) -> None:
    second = await start_service(SAMPLE, **env)
    first = await start_service(SAMPLE, **env, HEARTH_NEXT=second.address)
    async with grpc.aio.insecure_channel(first.address) as channel:
        stub = history_service_pb2_grpc.HistoryServiceStub(channel)
        call = stub.GetSnapshot(
            history_service_pb2.GetSnapshotRequest(page_size=9), metadata=[("traceparent", TRACEPARENT)]
        )
        await second.logs("sleeping")
        call.cancel()
    await first.terminate()
    await second.terminate()
    traced = [span for span in read(scratch / "spans.jsonl") if span["trace_id"] == CALLER_TRACE]
    by_id = {span["span_id"]: span for span in traced}
    assert [span["kind"] for span in traced if span["parent_id"] not in by_id] == ["SERVER"]
    assert sorted(span["kind"] for span in traced if span["name"] == SNAPSHOT) == ["CLIENT", "SERVER", "SERVER"]


async def test_the_span_of_a_stream_tells_its_opening(
    start_service: StartService, env: dict[str, str], scratch: Path
) -> None:
    sample = await start_service(SAMPLE, **env)
    async with grpc.aio.insecure_channel(sample.address) as channel:
        stub = history_service_pb2_grpc.HistoryServiceStub(channel)
        long, short = (
            stub.StreamEvents(history_service_pb2.StreamEventsRequest(), metadata=[("traceparent", TRACEPARENT)])
            for _ in range(2)
        )
        await long.read()
        await short.read()
        short.cancel()
        await asyncio.sleep(spans_module.STREAM_SPAN_SECONDS + 0.6)
        # Both are out while one stream is still open.
        found = [span for span in read(scratch / "spans.jsonl") if span["name"] == EVENTS]
        assert [span["attributes"].get("hearth.stream.open") for span in found] == [None, True]
        assert {span["parent_id"] for span in found} == {"b7ad6b7169203331"}
        long.cancel()
