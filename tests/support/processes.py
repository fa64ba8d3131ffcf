"""Services as tests see them from outside: real processes on ports of their own, that can be killed and come back."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

# In the environment of everything that a test run starts, so that grandchildren are found as well.
MARKER = "HEARTH_TEST_RUN"
_POLL_SECONDS = 0.02
_TAIL_LINES = 60
_ROOT = Path(__file__).resolve().parents[2]

_numbers = itertools.count(1)
started: list[ServiceProcess] = []


class ServiceProcess:
    """`python -m <module>` with the given environment, listening on a free port that it keeps over restarts.

    Blocking calls are for fixtures; the `async` ones leave the event loop free for the clients of the test. Whoever
    starts it stops it: `stop` is safe to call at any time.
    """

    def __init__(
        self,
        module: str,
        directory: Path,
        env: Mapping[str, str] | None = None,
        *,
        health_service: str = "",
        arguments: Sequence[str] = (),
    ) -> None:
        """`directory` takes the log and the address file; `env` is added to the inherited one, without its HEARTH_*."""
        self.module = module
        self.env = dict(env or {})
        self._arguments = list(arguments)
        self._health_service = health_service
        self._listen = self.env.get("HEARTH_LISTEN", "127.0.0.1:0")
        name = f"{module.rsplit('.', 1)[-1]}-{next(_numbers)}"
        self.log_file = directory / f"{name}.log"
        self._address_file = directory / f"{name}.address"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        """host:port it serves on; known after the first start."""
        return self._listen

    @property
    def pid(self) -> int:
        """Of the process that runs now, or ran last."""
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether the process is there; a stopped (frozen) one is."""
        return self._process is not None and self._process.poll() is None

    def log(self) -> str:
        """Everything it wrote to stdout and stderr, over all its starts."""
        return self.log_file.read_text("utf-8", "replace") if self.log_file.exists() else ""

    def log_tail(self) -> str:
        """The end of its log."""
        return "\n".join(self.log().splitlines()[-_TAIL_LINES:])

    def start_blocking(self, timeout: float = 30.0) -> None:
        """Start and return when its health says SERVING; raises AssertionError with its log otherwise."""
        self.launch()
        self.wait_serving(timeout)

    def wait_serving(self, timeout: float = 30.0) -> None:
        """Return when the health of what `launch` started says SERVING; AssertionError with its log otherwise."""
        ends = time.monotonic() + timeout
        while not self.serving():
            assert self.running, f"{self.module} ended with {self.exit_code()} while starting:\n{self.log_tail()}"
            if time.monotonic() > ends:
                self.kill9()
                raise AssertionError(f"{self.module} does not serve after {timeout} s:\n{self.log_tail()}")
            time.sleep(_POLL_SECONDS)

    def launch(self) -> None:
        """Start without waiting for anything."""
        assert not self.running, "runs already"
        self._address_file.unlink(missing_ok=True)
        inherited = {key: value for key, value in os.environ.items() if not key.startswith(("HEARTH_", "OTEL_"))}
        own = {"HEARTH_LISTEN": self._listen, "HEARTH_ADDRESS_FILE": str(self._address_file), MARKER: marker()}
        with self.log_file.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.module, *self._arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=_ROOT,
                env={**inherited, **self.env, **own},
                start_new_session=True,
            )
        if self not in started:
            started.append(self)

    def serving(self) -> bool:
        """Whether it answers SERVING now."""
        if not self._address_file.exists():
            return False
        self._listen = self._address_file.read_text()
        with grpc.insecure_channel(self._listen) as channel:
            request = health_pb2.HealthCheckRequest(service=self._health_service)
            try:
                answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=1.0)
            except grpc.RpcError:
                return False
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def kill9(self) -> None:
        """End it as a crash does, and wait until it is gone."""
        assert self._process is not None
        self._process.kill()
        self._process.wait(10)

    def freeze(self) -> None:
        """SIGSTOP: it keeps its connections and answers nothing."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        os.kill(self.pid, signal.SIGCONT)

    def signal(self, number: signal.Signals) -> None:
        """Send it any other signal."""
        os.kill(self.pid, number)

    def wait_blocking(self, timeout: float = 35.0) -> int:
        """Wait for its end; the exit code."""
        assert self._process is not None
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill9()
            raise AssertionError(f"{self.module} did not end in {timeout} s:\n{self.log_tail()}") from None

    def stop(self, timeout: float = 35.0) -> int | None:
        """SIGTERM and wait: the exit code, None if never started. AssertionError if it does not end (it is killed)."""
        if self._process is None:
            return None
        if self.running:
            os.kill(self.pid, signal.SIGCONT)
            os.kill(self.pid, signal.SIGTERM)
        return self.wait_blocking(timeout)

    def exit_code(self) -> int | None:
        """Of the last run; negative when a signal ended it, None while it runs."""
        return self._process.poll() if self._process is not None else None

    async def start(self, timeout: float = 30.0) -> None:
        """As `start_blocking`."""
        await asyncio.to_thread(self.start_blocking, timeout)

    async def logs(self, words: str, timeout: float = 10.0) -> None:
        """Return when `words` are in its log; AssertionError after `timeout` seconds without them."""
        ends = time.monotonic() + timeout
        while words not in self.log():
            assert time.monotonic() < ends, f"{words!r} is not in the log of {self.module}:\n{self.log_tail()}"
            await asyncio.sleep(_POLL_SECONDS)

    async def terminate(self, timeout: float = 35.0) -> int | None:
        """As `stop`."""
        return await asyncio.to_thread(self.stop, timeout)

    async def wait(self, timeout: float = 35.0) -> int:
        """As `wait_blocking`."""
        return await asyncio.to_thread(self.wait_blocking, timeout)

    async def restart(self, timeout: float = 30.0) -> None:
        """Start again on the same port, after it was ended somehow; ends it first if it still runs."""
        if self.running:
            await self.terminate()
        await self.start(timeout)


def marker() -> str:
    """What marks the processes of this test run."""
    return str(os.getpid())


def left_behind() -> list[str]:
    """Processes of this test run that are still there, each in words."""
    return [f"pid {process.pid}: {' '.join(process.cmdline())}" for process in _marked()]


def kill_left_behind() -> None:
    """End them, so that one leak is reported once and does not slow what comes after."""
    for process in _marked():
        process.kill()


def _marked() -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.pid == os.getpid() or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(MARKER) == marker():
                found.append(process)
    return found
