"""docs/api.md is true: its lines run from top to bottom and answer what it shows, and every call has a line there."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from pathlib import Path

from google.protobuf.descriptor import ServiceDescriptor

from hearth.history.v1 import history_service_pb2
from hearth.pool.v1 import pool_service_pb2, replica_service_pb2
from hearth.relay.v1 import relay_service_pb2
from hearth.sandbox.v1 import sandbox_service_pb2
from hearth.session.v1 import session_service_pb2
from tests.support.cli import running
from tests.support.servers import Servers

PAGE = Path(__file__).resolve().parents[2] / "docs" / "api.md"
FILES = (
    session_service_pb2,
    history_service_pb2,
    relay_service_pb2,
    sandbox_service_pb2,
    pool_service_pb2,
    replica_service_pb2,
)


def steps(text: str) -> list[tuple[str, list[str]]]:
    """Commands of the console blocks, each with the lines that its output holds."""
    found = list[tuple[str, list[str]]]()
    for block in re.findall(r"^```console\n(.*?)^```", text, re.M | re.S):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            elif line.startswith("    "):
                found[-1] = (f"{found[-1][0]}\n{line}", [])
            else:
                found[-1][1].append(line)
    return found


def test_every_call_has_a_line() -> None:
    services: list[ServiceDescriptor] = [
        service for file in FILES for service in file.DESCRIPTOR.services_by_name.values()
    ]
    wanted = {f"{service.full_name}/{method.name}" for service in services for method in service.methods}
    called = set(
        re.findall(r"hearth\.\w+\.v1\.\w+Service/\w+", "\n".join(command for command, _ in steps(PAGE.read_text())))
    )
    assert called == wanted


async def test_the_lines_run_and_answer_what_is_shown(servers: Servers) -> None:
    # The stack of the test stands for the one that the page starts and stops.
    tour = [step for step in steps(PAGE.read_text()) if step[0] not in ("hearth up", "hearth down")]
    directory = servers.scratch()
    script = ["set -o pipefail"]
    for number, (command, _) in enumerate(tour):
        # A command that fails ends the shell with its number; what each wrote lies in a file of its own.
        script.append(f"{{ {command}\n}} >{directory}/{number}.out 2>&1 || {{ echo {number}; exit 1; }}")
    async with running(servers.scratch() / ".hearth") as stack:
        environment = {**stack.environment, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        process = await asyncio.create_subprocess_exec(
            *("bash", "-c", "\n".join(script)), env=environment, stdout=asyncio.subprocess.PIPE
        )
        async with asyncio.timeout(100):
            told, _ = await process.communicate()
    failed = [(tour[int(number)][0], (directory / f"{number.decode()}.out").read_text()) for number in told.split()]
    assert failed == []
    for number, (command, shown) in enumerate(tour):
        output = (directory / f"{number}.out").read_text()
        for line in shown:
            assert line in output, f"{command}\n{output}"
