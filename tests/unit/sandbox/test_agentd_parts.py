"""Small parts of agentd: the bounded log, the process table, the patience with a reader."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import cast

import pytest
from aiohttp import web

from services.sandbox.agentd import server as server_module
from services.sandbox.agentd.agents import AgentServer
from services.sandbox.agentd.children import Entry, below, read_table, table_from_ps
from services.sandbox.agentd.logfile import LogFile
from services.sandbox.agentd.ring import Ring


def test_a_log_never_takes_more_than_twice_its_limit(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "deep" / "agent.log", limit=100)
    for index in range(100):
        log.write(f"line {index:04}\n".encode())
    log.close()
    log.write(b"after the close\n")
    log.close()
    old, new = (tmp_path / "deep" / name for name in ("agent.log.1", "agent.log"))
    assert old.stat().st_size <= 100
    assert new.stat().st_size <= 100
    lines = (old.read_text() + new.read_text()).splitlines()
    assert lines == [f"line {index:04}" for index in range(100 - len(lines) + 1, 100)] + ["after the close"]


def test_a_log_that_cannot_be_written_is_given_up_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("")
    log = LogFile(tmp_path / "file" / "agent.log")
    with caplog.at_level(logging.WARNING):
        log.write(b"secret")
        log.write(b"secret")
    assert len(caplog.records) == 1
    assert "secret" not in caplog.text


def test_descendants_are_found_over_all_generations() -> None:
    parents = {1: 0, 2: 1, 3: 2, 4: 3, 5: 1, 6: 9, 7: 7}
    table = {pid: Entry(parent, pid) for pid, parent in parents.items()}
    assert below(table, {2}) == {3, 4}
    assert below(table, {1, 9}) == {2, 3, 4, 5, 6}
    assert below(table, {4}) == set()


def test_ps_and_proc_agree() -> None:
    by_ps, by_proc = table_from_ps(), read_table()
    assert by_ps[os.getpid()].parent == by_proc[os.getpid()].parent == os.getppid()
    assert by_ps[os.getppid()].parent == by_proc[os.getppid()].parent


class StuckResponse:
    """A response whose reader takes nothing."""

    async def write(self, _data: bytes) -> None:
        await asyncio.Event().wait()


async def test_a_reader_that_takes_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class OnlyRing:
        ring = Ring()

    OnlyRing.ring.append(b"{}")
    monkeypatch.setattr(server_module, "READER_S", 0.05)
    with pytest.raises(TimeoutError):
        await server_module._follow(
            cast(AgentServer, OnlyRing), 0, cast(web.StreamResponse, StuckResponse()), heartbeat=15
        )
