"""The page of metrics of a process, and the same numbers at a collector."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

import aiohttp
import grpc.aio
import pytest

from hearth.history.v1 import history_service_pb2, history_service_pb2_grpc
from hearth.types.v1 import session_pb2
from services.chassis.scopes import SCOPES
from tests.conftest import StartService
from tests.contract.pool.house import eventually
from tests.support.collector import collecting
from tests.support.metrics import read

SAMPLE = "tests.support.sample"


@pytest.fixture
def env(postgres_dsn: str, valkey_url: str, scratch: Path) -> dict[str, str]:
    return {
        "HEARTH_POSTGRES_DSN": postgres_dsn,
        "HEARTH_VALKEY_URL": valkey_url,
        "HEARTH_METRICS_LISTEN": "127.0.0.1:0",
        "HEARTH_METRICS_ADDRESS_FILE": str(scratch / "metrics"),
    }


async def visit(address: str) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = history_service_pb2_grpc.HistoryServiceStub(channel)
        await stub.GetHeads(history_service_pb2.GetHeadsRequest(), timeout=10)


async def test_a_process_tells_its_calls_and_what_it_depends_on(
    start_service: StartService, env: dict[str, str], scratch: Path
) -> None:
    sample = await start_service(SAMPLE, **env)
    await visit(sample.address)
    page = await read((scratch / "metrics").read_text())
    method = "hearth.history.v1.HistoryService/GetHeads"
    assert page.value("rpc_server_call_duration_seconds_count", rpc_method=method, rpc_response_status_code="OK") == 1
    assert page.value("hearth_dependency_up", dependency="postgres") == 1
    assert page.value("process_open_fds") > 0
    assert page.value("target_info", service_name="hearth-sample") == 1


async def test_defects_are_counted_from_the_first_on_of_calls_and_of_streams(
    start_service: StartService, env: dict[str, str], scratch: Path
) -> None:
    sample = await start_service(SAMPLE, **env)
    address = (scratch / "metrics").read_text()
    name = "hearth_calls_broken_total"
    page = await read(address)
    methods = [method.lstrip("/") for method in SCOPES]
    assert [page.values(name, rpc_method=method) for method in methods] == [[0.0]] * len(methods)
    async with grpc.aio.insecure_channel(sample.address) as channel:
        stub = history_service_pb2_grpc.HistoryServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.MarkIncomplete(history_service_pb2.MarkIncompleteRequest(), timeout=10)
        key = session_pb2.SessionKey(project="p", session="defect")
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.StreamEvents(history_service_pb2.StreamEventsRequest(session=key), timeout=10).read()
        # What a caller did wrong is none.
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.DeleteLog(history_service_pb2.DeleteLogRequest(), timeout=10)
    page = await read(address)
    for method, times in (("MarkIncomplete", 1), ("StreamEvents", 1), ("DeleteLog", 0)):
        assert page.values(name, rpc_method=f"hearth.history.v1.HistoryService/{method}") == [times]


async def test_the_page_is_one_page(start_service: StartService, env: dict[str, str], scratch: Path) -> None:
    await start_service(SAMPLE, **env)
    address = (scratch / "metrics").read_text()
    async with aiohttp.ClientSession() as session:
        async with session.get(f"http://{address}/") as answer:
            assert answer.status == 404
        async with session.post(f"http://{address}/metrics") as answer:
            assert answer.status == 405
        accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
        async with session.get(f"http://{address}/metrics", headers=accept) as answer:
            assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
            assert (await answer.text()).endswith("# EOF\n")
        accept = {"Accept": "application/openmetrics-text; version=none"}
        async with session.get(f"http://{address}/metrics", headers=accept) as answer:
            assert answer.status == 200
            assert answer.headers["Content-Type"].startswith("text/plain")


async def test_a_taken_port_ends_the_start(start_service: StartService, env: dict[str, str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(AssertionError, match=r"ended with 2(?s:.*)set HEARTH_METRICS_LISTEN to another"):
            await start_service(SAMPLE, **{**env, "HEARTH_METRICS_LISTEN": address})


async def test_a_collector_that_never_answers_does_not_keep_a_process(
    start_service: StartService, env: dict[str, str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        sample = await start_service(SAMPLE, **env, OTEL_EXPORTER_OTLP_ENDPOINT=endpoint)
        await visit(sample.address)
        sample.signal(signal.SIGTERM)
        # One batch alone would take 10 s.
        assert await sample.wait(9) == 0
    assert "the collector does not answer" in sample.log()
    assert "Traceback" not in sample.log()


async def test_a_collector_is_told_the_same(start_service: StartService, env: dict[str, str]) -> None:
    async with collecting() as collector:
        sample = await start_service(
            SAMPLE, **env, OTEL_EXPORTER_OTLP_ENDPOINT=collector.endpoint, OTEL_METRIC_EXPORT_INTERVAL="100"
        )
        await visit(sample.address)
        wanted = {"hearth.dependency.up", "rpc.server.call.duration", "hearth.metrics.reading.failures"}

        async def told() -> bool:
            return wanted <= {metric.name for _, metric in collector.metrics}

        await eventually(told)
        assert {service for service, _ in collector.metrics} == {"hearth-sample"}
