"""A stack with two replicas of the pool, as a person runs it: one address for both, and commands find the right one."""

from __future__ import annotations

import signal
from pathlib import Path

import psutil
import pytest

from tests.support.cli import SERVICES, Hearth


@pytest.mark.exhaustive
@pytest.mark.timeout(240)
async def test_a_stack_with_two_replicas_goes_on_with_one(scratch: Path) -> None:
    hearth = Hearth(scratch / ".hearth")
    ports = [part for name in SERVICES for part in (f"--{name}-port", "0")]
    try:
        started = await hearth.run("up", "--json", "--pools", "2", *ports)
        states = {part["name"]: part["state"] for part in started.json()["components"]}
        assert (states["pool"], states["pool-2"]) == ("serving", "serving")
        sessions = [f"s{number}" for number in range(4)]
        for session in sessions:
            assert (await hearth.run("send", session, "remember my name is Ada", "--wait")).code == 0
        replicas = (await hearth.run("pool", "replicas", "--json")).json()["replicas"]
        assert {one["address"] for one in replicas} == {hearth.addresses()[name] for name in ("pool", "pool-2")}
        # Whoever keeps it.
        kept = (await hearth.run("pool", "entries", "--json")).json()["entries"]
        assert sorted(entry["session"]["session"] for entry in kept) == sessions
        for session in sessions[:2]:
            assert (await hearth.run("pool", "evict", session)).code == 0

        second = next(one for one in replicas if one["address"] == hearth.addresses()["pool-2"])
        drained = await hearth.run("pool", "drain", second["holder"], "--wait", "--json")
        assert drained.json() == {"holder": second["holder"], "driving": 0}
        for session in sessions:
            assert (await hearth.run("send", session, "what is my name?", "--wait")).code == 0
        # Nothing but time is lost with a process that dies.
        psutil.Process(hearth.pids()["pool-2"]).send_signal(signal.SIGKILL)
        assert (await hearth.run("send", sessions[0], "what is my name?", "--wait")).code == 0
        again = await hearth.run("up", "--json", "--pools", "2", *ports)
        assert again.json()["started"]
        for session in sessions:
            assert "Ada" in (await hearth.run("send", session, "what is my name?", "--wait")).stdout
    finally:
        down = await hearth.run("down", "--json")
    assert down.json() == {"stopped": True}
