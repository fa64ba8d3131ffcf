"""Fixtures of all tests: databases and a bus to themselves, services as processes, and a check that nothing is left."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio
from opentelemetry import trace

from tests.support import processes
from tests.support.processes import ServiceProcess
from tests.support.servers import Servers

# Taken out of the environment: a setting of the person who runs the tests must not reach what they test.
GIVEN = {key: os.environ.pop(key) for key in list(os.environ) if key.startswith(("HEARTH_", "OTEL_"))}

# Where a module may take minutes, and where one starts what stays until the worker ends, or is quickly over.
FIRST = ("tests/agents/", "tests/model/", "tests/property/", "tests/faults/")
LAST = ("tests/e2e/", "tests/unit/")

StartService = Callable[..., Awaitable[ServiceProcess]]


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    """Postgres and Valkey for this run, each started when it is first needed."""
    found = Servers(
        postgres_dsn=GIVEN.get("HEARTH_POSTGRES_DSN", ""),
        valkey_url=GIVEN.get("HEARTH_VALKEY_URL", ""),
    )
    try:
        yield found
    finally:
        found.close()
        assert not found.directory.exists(), f"{found.directory} is left"


@pytest.fixture(scope="session", autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails the run when a process that a test started, or a child of it, still runs at the end."""
    yield
    left = processes.left_behind()
    processes.kill_left_behind()
    assert not left, "left running:\n" + "\n".join(left)


@pytest.fixture
def scratch(servers: Servers) -> Path:
    """An empty directory that other users can enter, for the data of servers and services."""
    return servers.scratch()


@pytest.fixture
def postgres_dsn(servers: Servers) -> Iterator[str]:
    """A fresh database for this test."""
    dsn = servers.create_database()
    yield dsn
    servers.drop_database(dsn)


@pytest.fixture(scope="module", autouse=True)
def untraced() -> Iterator[None]:
    """No test sets up the telemetry of its own process: nobody can undo that, and all later ones would be traced."""
    yield
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)


@pytest.fixture
def migrated_dsn(servers: Servers) -> Iterator[str]:
    """A fresh database for this test, with the schemas of the services."""
    dsn = servers.create_database(migrated=True)
    yield dsn
    servers.drop_database(dsn)


@pytest.fixture(scope="module")
def module_postgres_dsn(servers: Servers) -> Iterator[str]:
    """A fresh database for this test module, with the schemas of the services."""
    dsn = servers.create_database(migrated=True)
    yield dsn
    servers.drop_database(dsn)


@pytest.fixture
def valkey_url(servers: Servers) -> str:
    """An empty Valkey database for this test; its pub/sub channels are not its own."""
    return servers.empty_valkey()


@pytest.fixture(scope="module")
def module_valkey_url(servers: Servers) -> str:
    """An empty Valkey database for this test module."""
    return servers.empty_valkey()


@pytest_asyncio.fixture
async def start_service(scratch: Path) -> AsyncIterator[StartService]:
    """`await start_service("services.history", HEARTH_POSTGRES_DSN=dsn)` → a serving process, ended after the test.

    The keyword `health_service` names the health to wait for; every other one is an environment variable.
    """
    mine: list[ServiceProcess] = []

    async def start(module: str, *, health_service: str = "", **env: str) -> ServiceProcess:
        service = ServiceProcess(module, scratch, env, health_service=health_service)
        mine.append(service)
        await service.start()
        return service

    yield start
    for service in reversed(mine):
        if service.running:
            await service.terminate()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the modules that take long: the last to begin decide when all workers are done."""
    order = (*FIRST, "", *LAST)

    def rank(item: pytest.Item) -> int:
        return next((at for at, name in enumerate(order) if name and item.nodeid.startswith(name)), len(FIRST))

    items.sort(key=rank)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Shows the logs of the services that run beside a failure."""
    report = yield
    if report.failed:
        for service in processes.started:
            if service.running or call.excinfo is not None:
                report.sections.append((f"log of {service.module} (pid {service.pid})", service.log_tail()))
    if report.when == "teardown":
        processes.started[:] = [service for service in processes.started if service.running]
    return report
