"""All sandboxes: how they come, change their state, and go."""

from __future__ import annotations

import asyncio
import os
import secrets
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support.daytona import rules
from tests.support.daytona.addresses import Addresses
from tests.support.daytona.delays import Chance, Delays, Range
from tests.support.daytona.faults import Fault, Kind
from tests.support.daytona.journal import Journal
from tests.support.daytona.limits import Quotas, check_quota
from tests.support.daytona.problems import conflict, not_found
from tests.support.daytona.processes import MARKER, Base
from tests.support.daytona.sandbox import ORGANIZATION, Sandbox, Wanted, create
from tests.support.daytona.volumes import Volumes

# Told of each change: the sandbox, its old state (nothing for a new one).
Listener = Callable[[Sandbox, str], None]


class _Broken(Exception):
    """A transition failed, on purpose or because this machine refused."""


@dataclass(frozen=True, slots=True)
class Setting:
    """How a fleet behaves. `minute` is how many seconds a minute of an interval lasts."""

    directory: Path
    delays: Delays
    quotas: Quotas
    minute: float
    agent_command: Sequence[str] = ()
    inherit: Sequence[str] = ()


class Fleet:
    """The sandboxes of the organization."""

    def __init__(self, setting: Setting, journal: Journal, volumes: Volumes) -> None:
        self.setting = setting
        self.volumes = volumes
        self._journal = journal
        self._chance = Chance(setting.delays.seed)
        self._addresses = Addresses()
        self._sandboxes: dict[str, Sandbox] = {}
        self._bases: list[Base] = []
        self._made = self._destroyed = 0
        self._listeners: list[Listener] = []
        self._timers = asyncio.get_running_loop().create_task(self._run_timers())

    def listen(self, listener: Listener) -> None:
        """Be told of changes."""
        self._listeners.append(listener)

    def all(self) -> Sequence[Sandbox]:
        """Every sandbox that is not destroyed, oldest first."""
        return list(self._sandboxes.values())

    def find(self, reference: str) -> Sandbox:
        """By id or name. Raises a 404 `Problem`; an errored one that was told to go away is gone as well."""
        found = self._sandboxes.get(reference)
        if found is None:
            found = next((sandbox for sandbox in self.all() if sandbox.name == reference), None)
        if found is None or (found.state in rules.ERRORED and found.desired == "destroyed"):
            raise not_found(reference)
        return found

    def running(self) -> int:
        """How many cost processor and memory now."""
        return sum(1 for sandbox in self.all() if sandbox.state in rules.CHARGED or sandbox.base is not None)

    def counts(self) -> Mapping[str, int]:
        """How many are in each state; destroyed ones too."""
        return +Counter({"destroyed": self._destroyed, **Counter(sandbox.state for sandbox in self.all())})

    def create(self, wanted: Wanted, fault: Fault | None) -> Sandbox:
        """Begin to make one. Refuses a taken name, a volume that is not there, more than the quotas."""
        if wanted.name and any(sandbox.name == wanted.name for sandbox in self.all()):
            raise conflict(f"Sandbox with name {wanted.name} already exists")
        self.volumes.check(wanted.mounts)
        kept = self.all()
        check_quota(
            self.setting.quotas,
            wanted.resources,
            [one.resources for one in kept if one.state in rules.CHARGED],
            [one.resources for one in kept],
        )
        self._made += 1
        sandbox = create(self._made, wanted, self.setting.directory / "sandboxes", self._addresses.take())
        self._sandboxes[sandbox.id] = sandbox
        self._tell(sandbox, "", "create")
        delays = self.setting.delays
        through: list[tuple[str, Range]] = [("creating", delays.create)]
        if wanted.dockerfile:
            through.insert(0, ("building_snapshot", delays.build))
        self._begin(sandbox, "create", "started", through, self._make, fault)
        return sandbox

    def start(self, sandbox: Sandbox, fault: Fault | None, cause: str = "start") -> None:
        """Begin to start it."""
        rules.check_start(sandbox.standing)
        check_quota(
            self.setting.quotas,
            sandbox.resources,
            [one.resources for one in self.all() if one.state in rules.CHARGED],
            [one.resources for one in self.all() if one is not sandbox],
        )
        delays = self.setting.delays
        through: list[tuple[str, Range]] = [("starting", delays.start)]
        if sandbox.state in ("archived", "archiving"):
            through.insert(0, ("restoring", delays.restore))
        self._begin(sandbox, cause, "started", through, self._run, fault)

    def recover(self, sandbox: Sandbox, fault: Fault | None) -> None:
        """Begin to bring it back from an error."""
        rules.check_recover(sandbox.standing)
        self._begin(sandbox, "recover", "started", [("starting", self.setting.delays.start)], self._run, fault)

    def stop(self, sandbox: Sandbox, fault: Fault | None, cause: str = "stop") -> None:
        """Begin to stop it; an ephemeral one is destroyed."""
        rules.check_stop(sandbox.standing)
        if sandbox.auto_delete == 0:
            self._destroy(sandbox, fault, cause)
        else:
            self._begin(sandbox, cause, "stopped", [("stopping", self.setting.delays.stop)], self._halt, fault)

    def archive(self, sandbox: Sandbox, cause: str = "archive") -> None:
        """Begin to archive it."""
        rules.check_archive(sandbox.standing)
        self._begin(sandbox, cause, "archived", [("archiving", self.setting.delays.archive)], self._halt, None)

    def delete(self, sandbox: Sandbox, fault: Fault | None, cause: str = "delete") -> None:
        """Begin to destroy it. Its name is free, and unknown, from now on."""
        rules.check_delete(sandbox.standing)
        self._destroy(sandbox, fault, cause)

    def kill(self, sandbox: Sandbox) -> None:
        """Let it die as a machine does: its processes go, it ends in `error`."""
        if sandbox.base is not None:
            sandbox.base.kill()

    async def wait(self, sandbox: Sandbox, states: Iterable[str], seconds: float) -> None:
        """Return when it is in one of these states, or after this time."""
        wanted = frozenset(states)
        try:
            async with asyncio.timeout(seconds):
                while sandbox.state not in wanted:
                    await sandbox.changed.wait()
        except TimeoutError:
            return

    def release(self) -> None:
        """Let stuck transitions go on."""
        for sandbox in self._sandboxes.values():
            if sandbox.unstick is not None:
                sandbox.unstick.set()

    async def close(self) -> None:
        """End every process, take away every link; directories stay where they are."""
        self._timers.cancel()
        works = [sandbox.work for sandbox in self._sandboxes.values() if sandbox.work is not None]
        for work in works:
            work.cancel()
        await asyncio.gather(self._timers, *works, return_exceptions=True)
        await asyncio.gather(*(self._halt(sandbox) for sandbox in self._sandboxes.values()))
        # One that died by itself belongs to no sandbox any more, and an interrupted end leaves one half ended.
        await asyncio.gather(*(base.settle() for base in self._bases))
        for base in self._bases:
            base.reap()
        self.volumes.close()
        self._addresses.close()

    # What transitions do.

    async def _make(self, sandbox: Sandbox) -> None:
        for part in ("home", "bin", "tmp"):
            (sandbox.directory / part).mkdir(parents=True, exist_ok=True)
        if self.setting.agent_command:
            _write_launcher(sandbox.directory / "bin" / "sandbox-agent", self.setting.agent_command)
        sandbox.env = _environment(sandbox, self.setting.inherit)
        await self._run(sandbox)

    async def _run(self, sandbox: Sandbox) -> None:
        self.volumes.mount(sandbox.id, sandbox.wanted.mounts)
        sandbox.preview_token = secrets.token_urlsafe(24)
        base = Base.start(sandbox.id, sandbox.environment(), sandbox.directory)
        self._bases.append(base)
        base.lost = lambda: self._died(sandbox, base)
        sandbox.base = base
        sandbox.touch()

    async def _halt(self, sandbox: Sandbox) -> None:
        base, sandbox.base = sandbox.base, None
        if base is not None:
            await base.end()
            await base.settle()
        self.volumes.unmount(sandbox.id)
        sandbox.stopped = time.monotonic()

    async def _remove(self, sandbox: Sandbox) -> None:
        await self._halt(sandbox)
        await asyncio.to_thread(shutil.rmtree, sandbox.directory, ignore_errors=True)
        self._addresses.give_back(sandbox.address)

    def _destroy(self, sandbox: Sandbox, fault: Fault | None, cause: str) -> None:
        sandbox.name = f"DESTROYED_{sandbox.name}_{int(time.time() * 1000)}"
        delay = self.setting.delays.delete
        self._begin(sandbox, cause, "destroyed", [("destroying", delay)], self._remove, fault)

    # How a transition goes.

    def _begin(
        self,
        sandbox: Sandbox,
        cause: str,
        desired: str,
        through: Sequence[tuple[str, Range]],
        work: Callable[[Sandbox], Awaitable[None]],
        fault: Fault | None,
    ) -> None:
        if sandbox.work is not None:  # archiving, which a start may interrupt
            sandbox.work.cancel()
        sandbox.pending, sandbox.desired = True, desired
        sandbox.unstick = asyncio.Event()
        self._set(sandbox, through[0][0], cause)
        sandbox.work = asyncio.get_running_loop().create_task(self._carry(sandbox, cause, through, work, fault))

    async def _carry(
        self,
        sandbox: Sandbox,
        cause: str,
        through: Sequence[tuple[str, Range]],
        work: Callable[[Sandbox], Awaitable[None]],
        fault: Fault | None,
    ) -> None:
        try:
            for state, delay in through:
                self._set(sandbox, state, cause)
                await asyncio.sleep(self._chance.seconds(delay))
            if fault is not None and fault.kind is Kind.STUCK:
                await self._stick(sandbox, fault)
            if fault is not None and fault.kind is Kind.BREAK:
                if sandbox.desired == "destroyed":  # from now on it is a 404, so it must not run
                    await self._halt(sandbox)
                raise _Broken(fault.message or "the runner failed")
            await work(sandbox)
        except (_Broken, OSError) as trouble:
            sandbox.error_reason = str(trouble)
            sandbox.recoverable = fault is None or fault.recoverable
            sandbox.pending = False
            self._set(sandbox, "error", cause)
        else:
            sandbox.error_reason, sandbox.recoverable, sandbox.pending = None, False, False
            if sandbox.desired == "destroyed":
                del self._sandboxes[sandbox.id]
                self._destroyed += 1
            self._set(sandbox, sandbox.desired, cause)
        finally:
            if sandbox.work is asyncio.current_task():
                sandbox.work = None

    async def _stick(self, sandbox: Sandbox, fault: Fault) -> None:
        assert sandbox.unstick is not None
        try:
            async with asyncio.timeout(fault.seconds or None):
                await sandbox.unstick.wait()
        except TimeoutError:
            return

    def _died(self, sandbox: Sandbox, base: Base) -> None:
        """Its base ended unasked: in a real sandbox all is over when pid 1 ends."""
        if sandbox.base is not base:
            return
        sandbox.base = None
        self.volumes.unmount(sandbox.id)
        if sandbox.pending:
            return
        sandbox.error_reason, sandbox.recoverable = "the container exited", True
        self._set(sandbox, "error", "died")

    def _set(self, sandbox: Sandbox, state: str, cause: str) -> None:
        if sandbox.state != state:
            old, sandbox.state = sandbox.state, state
            self._tell(sandbox, old, cause)
        sandbox.notify()

    def _tell(self, sandbox: Sandbox, old: str, cause: str) -> None:
        self._journal.write(
            "state", sandbox=sandbox.id, session=sandbox.session, old=old, new=sandbox.state, cause=cause
        )
        for listener in self._listeners:
            listener(sandbox, old)

    # Timers.

    async def _run_timers(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self.setting.minute / 20))
            for sandbox in self.all():
                if sandbox.state == "error" and sandbox.desired == "destroyed":
                    through = [("destroying", self.setting.delays.delete)]
                    self._begin(sandbox, "retry", "destroyed", through, self._remove, None)
                elif not sandbox.standing.changing:
                    self._look_at_timers(sandbox, time.monotonic())

    def _look_at_timers(self, sandbox: Sandbox, now: float) -> None:
        minute = self.setting.minute
        stopped_for = (now - sandbox.stopped) / minute
        if sandbox.ttl > 0 and (now - sandbox.created) / minute >= sandbox.ttl:
            self._time_out(sandbox, "ttl", self._destroy)
        elif sandbox.state == "started" and 0 < sandbox.auto_stop <= (now - sandbox.active) / minute:
            self._time_out(sandbox, "auto-stop", self.stop)
        elif sandbox.state in ("stopped", "archived") and 0 <= sandbox.auto_delete <= stopped_for:
            self._time_out(sandbox, "auto-delete", self._destroy)
        elif sandbox.state == "stopped" and 0 < sandbox.auto_archive <= stopped_for:
            self._time_out(sandbox, "auto-archive", lambda one, _, cause: self.archive(one, cause))

    def _time_out(self, sandbox: Sandbox, which: str, what: Callable[[Sandbox, Fault | None, str], None]) -> None:
        self._journal.write("timer", sandbox=sandbox.id, session=sandbox.session, which=which)
        what(sandbox, None, which)


def _environment(sandbox: Sandbox, inherit: Sequence[str]) -> dict[str, str]:
    return {
        **{name: os.environ[name] for name in inherit if name in os.environ},
        "LANG": os.environ.get("LANG", "C.UTF-8"),
        "PATH": f"{sandbox.directory / 'bin'}:{os.environ.get('PATH', os.defpath)}",
        "HOME": str(sandbox.home),
        "TMPDIR": str(sandbox.directory / "tmp"),
        **sandbox.wanted.secrets,
        **sandbox.wanted.env,
        MARKER: sandbox.id,
        "DAYTONA_SANDBOX_SNAPSHOT": sandbox.wanted.snapshot,
        "DAYTONA_SANDBOX_USER": sandbox.wanted.user,
        "DAYTONA_ORGANIZATION_ID": ORGANIZATION,
        "DAYTONA_REGION_ID": sandbox.wanted.target,
        "DAYTONA_STAND_IN_ADDRESS": sandbox.address,
    }


def _write_launcher(path: Path, command: Sequence[str]) -> None:
    path.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    path.chmod(0o755)
