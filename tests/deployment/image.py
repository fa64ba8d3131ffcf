"""The Dockerfile without Docker: its context, and its steps carried out below a directory.

What the base images bring is this machine's: Python of the same version. Accounts are not made. A path of the image is
one below the directory, and the commands are rewritten accordingly, which is enough as long as they name their paths.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pathspec
from dockerfile_parse import DockerfileParser

from tests.deployment.compose import ROOT

# Directories of the image that the steps use; those of the base image stay what they are.
_OWN = ("/src", "/wheels", "/build", "/dist", "/opt/hearth", "/var/lib/hearth")
_MAKES_ACCOUNTS = ("groupadd", "useradd")


@dataclass(frozen=True, slots=True)
class Step:
    """One instruction. `stage` counts the FROMs before it."""

    stage: int
    name: str
    value: str


@dataclass(slots=True)
class Image:
    """What is left of the last stage."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    user: str = ""
    directory: str = "/"
    health_check: list[str] = field(default_factory=list)
    # Instructions that were left out, as nothing without Docker does them.
    left_out: list[str] = field(default_factory=list)

    def at(self, path: str) -> Path:
        """A path of the image on this machine."""
        return self.root / path.lstrip("/")


def steps() -> list[Step]:
    """Of the Dockerfile."""
    with (ROOT / "Dockerfile").open("rb") as file:
        found, stage = [], 0
        for one in DockerfileParser(fileobj=file).structure:
            stage += one["instruction"] == "FROM"
            if one["instruction"] != "COMMENT":
                found.append(Step(stage, one["instruction"], one["value"]))
        return found


def context(target: Path) -> None:
    """What Docker would be sent: the files under version control, and new ones, that .dockerignore lets through."""
    ignored = pathspec.PathSpec.from_lines("gitignore", (ROOT / ".dockerignore").read_text().splitlines())
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    for name in listed.stdout.splitlines():
        if not ignored.match_file(name) and (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)


def build(target: Path) -> Image:
    """Carry the steps out; the image of the last stage."""
    sent = target / "context"
    context(sent)
    all_steps = steps()
    images = [Image(target / f"stage-{number}") for number in range(1, all_steps[-1].stage + 1)]
    for step in all_steps:
        image = images[step.stage - 1]
        match step.name:
            case "FROM":
                assert f":{sys.version_info.major}.{sys.version_info.minor}-" in step.value, (
                    "another Python than this one"
                )
                image.root.mkdir()
            case "ENV":
                image.environment |= dict(part.split("=", 1) for part in shlex.split(step.value))
            case "WORKDIR":
                image.directory = step.value
                image.at(step.value).mkdir(parents=True, exist_ok=True)
            case "COPY":
                _copy(step.value, image, images, sent)
            case "RUN":
                _run(step.value, image)
            case "USER":
                image.user = step.value
            case "HEALTHCHECK":
                image.health_check = json.loads(step.value.partition("CMD ")[2])
            case _:
                image.left_out.append(f"{step.name} {step.value}")
    return images[-1]


def _copy(value: str, image: Image, images: list[Image], sent: Path) -> None:
    words = value.split()
    before = words[0] == "--from=build"
    *sources, target = words[before:]
    place = image.at(target if target.startswith("/") else f"{image.directory}/{target}")
    for source in sources:
        found = images[0].at(source) if before else sent / source
        if before:
            # It knows its own place, so it stays there under the other name.
            place.parent.mkdir(parents=True, exist_ok=True)
            place.symlink_to(found)
        elif found.is_dir():
            shutil.copytree(found, place, dirs_exist_ok=True)
        else:
            shutil.copy2(found, place / found.name if target.endswith("/") else place)


def _run(command: str, image: Image) -> None:
    kept = " && ".join(part for part in _parts(command) if part.split()[0] not in _MAKES_ACCOUNTS)
    if kept != command:
        image.left_out += [part for part in _parts(command) if part not in kept]
    # Who owns what is for the test to say: the account of the image is not here.
    kept = re.sub(r"-[og] hearth ", "", kept)
    for own in _OWN:
        kept = re.sub(rf"(?<![\w/.-]){own}\b", str(image.at(own)), kept)
    kept = re.sub(r"(?<![\w/.-])python(?= -m )", str(base_python()), kept)
    environment = {**_surroundings(), **image.environment}
    directory = image.at(image.directory)
    done = subprocess.run(
        ["nice", "/bin/sh", "-c", kept], cwd=directory, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{kept}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"


def _parts(command: str) -> Iterator[str]:
    for part in command.split("&&"):
        yield " ".join(part.split())


@functools.cache
def base_python() -> Path:
    """What stands for the Python of the base image: the first of that version that users without rights can run."""
    name = f"python{sys.version_info.major}.{sys.version_info.minor}"
    own = Path(sys._base_executable)  # type: ignore[attr-defined]
    for found in (own, Path("/usr/local/bin") / name, Path("/usr/bin") / name):
        if runs_for(nobody(), found):
            return found
    return own


def nobody() -> int | None:
    """A user without rights, which every machine has; None where this process is one already."""
    return 65534 if os.geteuid() == 0 else None


def runs_for(account: int | None, python: Path) -> bool:
    """Whether a user can start it, and make environments with it."""
    try:
        done = subprocess.run(
            [python, "-c", "import ensurepip, venv"],
            user=account,
            group=account,
            capture_output=True,
            cwd="/",
            check=False,
        )
    except OSError:
        return False
    return done.returncode == 0


def _surroundings() -> dict[str, str]:
    """Of this machine: how it reaches the index of packages."""
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "HTTP", "http"))}
    return {**kept, "PATH": os.environ["PATH"], "HOME": os.environ["HOME"]}
