"""A service process from start to end: migrations, health that is true, graceful and ungraceful ends, wrong starts."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Awaitable
from pathlib import Path

import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from hearth.embedded.postgres import EmbeddedPostgres
from hearth.history.v1 import history_service_pb2, history_service_pb2_grpc
from hearth.types.v1 import session_pb2
from services.chassis.errors import InvalidArgument, Unavailable, from_rpc_error
from tests.conftest import StartService
from tests.support.http2 import opened
from tests.support.processes import ServiceProcess

SAMPLE = "tests.support.sample"
SERVICE = "hearth.history.v1.HistoryService"
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def env(postgres_dsn: str, valkey_url: str) -> dict[str, str]:
    return {"HEARTH_POSTGRES_DSN": postgres_dsn, "HEARTH_VALKEY_URL": valkey_url, "HEARTH_SHUTDOWN_GRACE": "8"}


async def visits(address: str) -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = history_service_pb2_grpc.HistoryServiceStub(channel)
        answer = await stub.GetHeads(history_service_pb2.GetHeadsRequest(), timeout=10)
        return answer.heads[0].head.sequence


async def health_of(address: str, service: str = "") -> int:
    async with grpc.aio.insecure_channel(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        answer = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
        return int(answer.status)


async def wait_for_health(address: str, wanted: int, service: str = "") -> float:
    """Seconds until the health is `wanted`, seen by a Watch as a load balancer does."""
    began = time.monotonic()
    async with grpc.aio.insecure_channel(address) as channel, asyncio.timeout(20):
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=service))
        async for answer in watch:
            if answer.status == wanted:
                watch.cancel()
                break
    return time.monotonic() - began


async def test_start_serve_stop(start_service: StartService, env: dict[str, str]) -> None:
    sample = await start_service(SAMPLE, **env)
    assert [await visits(sample.address) for _ in range(2)] == [1, 2]
    assert await health_of(sample.address, SERVICE) == SERVING
    assert await sample.terminate() == 0
    address = sample.address
    await sample.restart()
    assert sample.address == address
    # What was committed is there, and the second start finds its schema done.
    assert await visits(sample.address) == 3
    assert sample.log().count("schema migrated") == 1


async def test_reflection_lists_the_services(start_service: StartService, env: dict[str, str]) -> None:
    sample = await start_service(SAMPLE, **env)
    async with grpc.aio.insecure_channel(sample.address) as channel:
        stub = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = [reflection_pb2.ServerReflectionRequest(list_services="")]
        async for answer in stub.ServerReflectionInfo(iter(requests)):
            names = {service.name for service in answer.list_services_response.service}
    assert names == {SERVICE, "grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"}


async def test_several_first_starts_at_once(scratch: Path, env: dict[str, str]) -> None:
    replicas = [ServiceProcess(SAMPLE, scratch, env) for _ in range(4)]
    try:
        await asyncio.gather(*(replica.start() for replica in replicas))
        assert sorted([await visits(replica.address) for replica in replicas]) == [1, 2, 3, 4]
        assert "Traceback" not in "".join(replica.log() for replica in replicas)
    finally:
        for replica in replicas:
            await replica.terminate()


async def test_health_follows_the_database(scratch: Path, valkey_url: str, start_service: StartService) -> None:
    postgres = EmbeddedPostgres(scratch / "own-postgres")
    running = await asyncio.to_thread(postgres.start_detached)
    try:
        sample = await start_service(SAMPLE, HEARTH_POSTGRES_DSN=running.url, HEARTH_VALKEY_URL=valkey_url)
        assert await visits(sample.address) == 1
        await asyncio.to_thread(postgres.stop)
        assert await wait_for_health(sample.address, NOT_SERVING) < 5
        assert await health_of(sample.address, SERVICE) == NOT_SERVING
        assert await health_of(sample.address, "valkey") == SERVING
        assert await health_of(sample.address, "postgres") == NOT_SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await visits(sample.address)
        refused = from_rpc_error(caught.value)
        assert isinstance(refused, Unavailable)
        assert refused.reason == "DEPENDENCY_UNAVAILABLE"
        assert refused.retry_after == 1
        await asyncio.to_thread(EmbeddedPostgres(scratch / "own-postgres", port=running.port).start_detached)
        assert await wait_for_health(sample.address, SERVING) < 10
        assert await visits(sample.address) == 2
        # Its loop went through the outage as well.
        assert [sample.log().count(f"background task {word}") for word in ("waits", "goes on", "died")] == [1, 1, 0]
    finally:
        await asyncio.to_thread(postgres.remove)


async def test_stop_with_an_open_stream_and_a_call_in_flight(start_service: StartService, env: dict[str, str]) -> None:
    sample = await start_service(SAMPLE, **env, HEARTH_DRAIN="0.3")
    async with grpc.aio.insecure_channel(sample.address) as channel:
        stub = history_service_pb2_grpc.HistoryServiceStub(channel)
        stream = stub.StreamEvents(history_service_pb2.StreamEventsRequest())
        await stream.read()
        in_flight = asyncio.create_task(
            _finished(stub.GetSnapshot(history_service_pb2.GetSnapshotRequest(page_size=1)))
        )
        await sample.logs("sleeping")
        sample.signal(signal.SIGTERM)
        await wait_for_health(sample.address, NOT_SERVING)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert from_rpc_error(caught.value).reason == "SHUTTING_DOWN"
        assert await in_flight
    assert await sample.wait() == 0
    log = sample.log()
    assert log.index("draining") < log.index("stream closed")


async def test_watchers_that_take_nothing_keep_no_process_from_its_end(
    start_service: StartService, env: dict[str, str]
) -> None:
    sample = await start_service(SAMPLE, **env, HEARTH_DRAIN="0.3")
    host, _, port = sample.address.rpartition(":")
    writers = []
    for _ in range(3):
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(opened(b"/grpc.health.v1.Health/Watch", window=0))
        writers.append(writer)
        # The headers of the answer, which no window holds up: the watch has begun to write.
        await asyncio.wait_for(reader.readuntil(b"application/grpc"), 10)
    sample.signal(signal.SIGTERM)
    assert await sample.wait() == 0
    # The steps of the shutdown were run, and within their time.
    assert "draining" in sample.log()
    assert "given up" not in sample.log()
    for writer in writers:
        writer.transport.abort()


async def test_what_needs_no_token_takes_no_large_message(start_service: StartService, env: dict[str, str]) -> None:
    sample = await start_service(SAMPLE, **env)
    async with grpc.aio.insecure_channel(sample.address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        for name in ("a" * 129, "a" * 1_000_000):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await health.Watch(health_pb2.HealthCheckRequest(service=name)).read()
            assert isinstance(from_rpc_error(refused.value), InvalidArgument)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await health.Check(health_pb2.HealthCheckRequest(service="a" * 1_000_000))
        assert from_rpc_error(refused.value).reason == "TOO_LARGE"
        reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
        requests = [reflection_pb2.ServerReflectionRequest(file_by_filename="a" * 1_000_000)]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await reflection.ServerReflectionInfo(iter(requests)).read()
        assert from_rpc_error(refused.value).reason == "TOO_LARGE"


async def _finished(call: Awaitable[object]) -> bool:
    await call
    return True


async def test_a_call_that_does_not_end_is_given_up(start_service: StartService, env: dict[str, str]) -> None:
    sample = await start_service(SAMPLE, **{**env, "HEARTH_SHUTDOWN_GRACE": "2"})
    async with grpc.aio.insecure_channel(sample.address) as channel:
        stub = history_service_pb2_grpc.HistoryServiceStub(channel)
        call = stub.GetSnapshot(history_service_pb2.GetSnapshotRequest(page_size=14))
        waiting = asyncio.create_task(_finished(call))
        await sample.logs("sleeping")
        assert await sample.terminate() == 0
        with pytest.raises(grpc.aio.AioRpcError):
            await waiting


async def test_the_second_signal_ends_at_once(start_service: StartService, env: dict[str, str]) -> None:
    sample = await start_service(SAMPLE, **env, HEARTH_DRAIN="7")
    sample.signal(signal.SIGINT)
    await wait_for_health(sample.address, NOT_SERVING)
    sample.signal(signal.SIGTERM)
    # The exit code tells that it did not end in order, which would have taken the drain of 7 s.
    assert await sample.wait() == 128 + signal.SIGTERM


async def test_a_dead_loop_ends_the_process(start_service: StartService, env: dict[str, str]) -> None:
    sample = await start_service(SAMPLE, **env)
    async with grpc.aio.insecure_channel(sample.address) as channel:
        stub = history_service_pb2_grpc.HistoryServiceStub(channel)
        await stub.TrimLog(history_service_pb2.TrimLogRequest())
    assert await sample.wait() == 1
    assert "background task died" in sample.log()
    assert "the loop broke" in sample.log()


async def test_a_taken_port_is_named(start_service: StartService, scratch: Path, env: dict[str, str]) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        second = ServiceProcess(SAMPLE, scratch, {**env, "HEARTH_LISTEN": address})
        second.launch()
        assert await second.wait() == 2
    assert f"cannot listen on {address}: address already in use" in second.log()
    assert "Traceback" not in second.log()


@pytest.mark.parametrize(
    ("setting", "words"),
    [("HEARTH_POSTGRES_DSN", "HEARTH_POSTGRES_DSN is not set"), ("HEARTH_VALKEY_URL", "HEARTH_VALKEY_URL is not set")],
)
async def test_a_missing_setting_is_named(scratch: Path, env: dict[str, str], setting: str, words: str) -> None:
    sample = ServiceProcess(SAMPLE, scratch, {key: value for key, value in env.items() if key != setting})
    sample.launch()
    assert await sample.wait() == 2
    assert words in sample.log()
    assert "Traceback" not in sample.log()


async def test_a_start_without_database_gives_up_and_says_so(scratch: Path, env: dict[str, str]) -> None:
    nowhere = {"HEARTH_POSTGRES_DSN": "postgresql://postgres@127.0.0.1:1/x", "HEARTH_POSTGRES_START_TIMEOUT": "0.5"}
    sample = ServiceProcess(SAMPLE, scratch, {**env, **nowhere})
    sample.launch()
    assert await sample.wait() == 1
    assert "Postgres at HEARTH_POSTGRES_DSN does not answer" in sample.log()
    assert "Traceback" not in sample.log()


async def test_a_signal_while_starting(scratch: Path, env: dict[str, str]) -> None:
    nowhere = {"HEARTH_POSTGRES_DSN": "postgresql://postgres@127.0.0.1:1/x", "HEARTH_POSTGRES_START_TIMEOUT": "60"}
    sample = ServiceProcess(SAMPLE, scratch, {**env, **nowhere, "HEARTH_LOG_LEVEL": "DEBUG"})
    sample.launch()
    await sample.logs("waiting for Postgres")
    assert await sample.terminate(5) == 0
    assert "told to end while starting" in sample.log()


async def test_frozen_is_not_serving(start_service: StartService, env: dict[str, str]) -> None:
    sample = await start_service(SAMPLE, **env)
    sample.freeze()
    assert not await asyncio.to_thread(sample.serving)
    sample.thaw()
    assert await asyncio.to_thread(sample.serving)


async def test_the_wrong_project_is_refused_nowhere_without_auth(
    start_service: StartService, env: dict[str, str]
) -> None:
    sample = await start_service(SAMPLE, **env)
    async with grpc.aio.insecure_channel(sample.address) as channel:
        stub = history_service_pb2_grpc.HistoryServiceStub(channel)
        key = session_pb2.SessionKey(project="anything", session="s")
        assert (await stub.GetHeads(history_service_pb2.GetHeadsRequest(sessions=[key]))).heads
