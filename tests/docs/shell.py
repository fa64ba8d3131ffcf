"""Runs the commands of a page as a reader does: in one shell, top to bottom, in a tree and on a stack of their own."""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from tests.docs.pages import ROOT, Step, missing
from tests.support import processes

VENV_BIN = Path(sys.executable).parent
STAMPS = (".installed", ".stubs")
# A reader has the usual ports; runs of this test must not meet each other, nor the stack of whoever starts them.
FREE_PORTS = {f"HEARTH_UP_{name}_PORT": "0" for name in ("POOL", "HISTORY", "RELAY", "SANDBOX")}

# Tells a program where the services of the stack are, since they have not the usual ports.
ON_THE_STACK = """on_the_stack() {
  env $(python - <<'END'
import json, os
parts = json.load(open(os.environ["HEARTH_ROOT"] + "/stack.json"))["processes"]
print(*(f"HEARTH_{part['name'].upper()}_ADDRESS={part['address']}" for part in parts))
END
) "$@"
}"""


def environment(root: Path, **more: str) -> dict[str, str]:
    """That of a shell whose stack lives below `root`, without settings of the person who runs the tests."""
    own = {
        key: value for key, value in os.environ.items() if not key.startswith(("HEARTH_", "OTEL_", "MAKE", "MFLAGS"))
    }
    return {
        **own,
        **FREE_PORTS,
        "HEARTH_ROOT": str(root),
        # By the marker the end of the test run finds what a page left running, sandboxes included.
        processes.MARKER: processes.marker(),
        "HEARTH_LOCAL_INHERIT": processes.MARKER,
        "NO_COLOR": "1",
        "COLUMNS": "120",
        **more,
    }


def path_with(first: Path) -> str:
    """PATH with a directory in front."""
    return f"{first}{os.pathsep}{os.environ['PATH']}"


def path_without(left_out: Path) -> str:
    """PATH without a directory."""
    return os.pathsep.join(part for part in os.environ["PATH"].split(os.pathsep) if Path(part) != left_out)


def copied_tree(directory: Path) -> Path:
    """The tree as it is now, what is not committed included, with the packages of this run in place of its own."""
    tree = directory / "hearth"
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    names = {Path(name) for name in listed.stdout.decode().split("\0") if name}
    names |= {stub.relative_to(ROOT) for stub in ROOT.glob("hearth/*/v1/*_pb2*")}
    for name in names:
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    # The stamps are those of the copy, and newer than all of it: `make` finds nothing to install, and leaves the
    # packages that this run uses alone.
    (tree / ".venv").mkdir()
    for part in Path(sys.prefix).iterdir():
        if part.name not in STAMPS:
            (tree / ".venv" / part.name).symlink_to(part)
    for stamp in STAMPS:
        (tree / ".venv" / stamp).touch()
    return tree


def cloned_tree(directory: Path) -> Path:
    """A fresh clone of what is committed, as a newcomer has it."""
    tree = directory / "hearth"
    subprocess.run(["git", "clone", "--quiet", "--no-local", f"file://{ROOT}", tree], check=True)
    return tree


async def run(page: Sequence[Step], *, tree: Path, outputs: Path, env: Mapping[str, str], seconds: float) -> list[str]:
    """What did not go as the page says: commands that failed or took too long, and shown lines that did not come."""
    outputs.mkdir(parents=True, exist_ok=True)
    script = ["set -o pipefail", ON_THE_STACK]
    for number, step in enumerate(page):
        (outputs / f"{number}.in").write_text(step.typed)
        place = shlex.quote(str(outputs / str(number)))
        # Braces, no subshell: what one command sets, the next ones have.
        script.append(f"echo {number}\n{{ {step.command}\n}} <{place}.in >{place}.out 2>&1 || exit 1")
    script.append("echo done")
    process = await asyncio.create_subprocess_exec(
        *("bash", "-c", "\n".join(script)), cwd=tree, env=env, stdout=asyncio.subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    reached = b""
    late = False
    try:
        async with asyncio.timeout(seconds):
            while line := await process.stdout.readline():
                reached = line
                if line == b"done\n":
                    break
            await process.wait()
    except TimeoutError:
        late = True
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    if reached != b"done\n":
        step = page[int(reached)]
        output = (outputs / f"{int(reached)}.out").read_text(errors="replace")
        return [f"line {step.line}: $ {step.command}\n{f'not done after {seconds} s' if late else 'failed'}:\n{output}"]
    problems = []
    for number, step in enumerate(page):
        output = (outputs / f"{number}.out").read_text(errors="replace")
        if lacks := missing(step.shown, output):
            problems.append(f"line {step.line}: $ {step.command}\nwithout {lacks} in\n{output}")
    return problems


async def stop_stack(root: Path, env: Mapping[str, str]) -> None:
    """End the stack that a page left running, or do nothing."""
    if (root / "stack.json").exists():
        process = await asyncio.create_subprocess_exec(
            *(VENV_BIN / "hearth", "down"), env=env, stdout=asyncio.subprocess.DEVNULL
        )
        assert await process.wait() == 0
