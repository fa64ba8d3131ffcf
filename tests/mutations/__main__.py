"""Take guards back, one at a time, and see that the named test goes red.

`python -m tests.mutations [CODE...]` copies the tree to a temporary directory, runs the named tests there as they are
(all must pass), then each with its one change, prints a table and exits with 1 when a test stayed green, failed before
the change, or failed with it in another way than by its own assertion or by waiting in vain.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.util import cache_from_source
from pathlib import Path
from xml.etree import ElementTree as ET

from tests.mutations import ROOT, Mutation, load
from tests.mutations.verdicts import Verdict, read

# A test that waits in vain for what the change took away need not wait as long as a busy machine may take.
_TEST_SECONDS = 60
_RUN_SECONDS = 900
_PLACE = "import hearth, services, tests; print(*(m.__path__[0] for m in (hearth, services, tests)), sep='\\n')"


class Copy:
    """The tree once more, in a directory of its own. `run` uses this interpreter and imports nothing from the first."""

    def __init__(self, directory: Path) -> None:
        self._root = directory / "tree"
        self._report = directory / "report.xml"
        for name in _files():
            target = self._root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target)
        # Hearth is installed as a path to the first tree; this one comes before it, in services that tests start too.
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(("HEARTH_", "PYTEST_"))}
        self._env = {**inherited, "PYTHONPATH": str(self._root)}
        self._check()

    def run(self, tests: Sequence[str], *, timeout: int | None = None) -> dict[str, Verdict]:
        """What became of each of `tests`."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junit-xml={self._report}"]
        self._report.unlink(missing_ok=True)
        bound = [] if timeout is None else [f"--timeout={timeout}"]
        done = subprocess.run(
            [*command, *bound, *tests],
            cwd=self._root,
            env=self._env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_RUN_SECONDS,
            check=False,
        )
        if not self._report.exists():
            return {test: Verdict("broken", done.stdout.strip().rpartition("\n")[2]) for test in tests}
        found = read(ET.parse(self._report).getroot())
        return {test: found.get(test, Verdict("broken", "did not run")) for test in tests}

    def mutated(self, mutation: Mutation) -> Verdict:
        """What becomes of the test with the change."""
        path = self._root / mutation.file
        text = path.read_text()
        self._write(path, mutation.applied(text))
        try:
            return self.run([mutation.test], timeout=_TEST_SECONDS)[mutation.test]
        finally:
            self._write(path, text)

    def _write(self, path: Path, text: str) -> None:
        path.write_text(text)
        if path.suffix == ".py":
            # Python knows a stale file by its time and size, and both may be what they were.
            Path(cache_from_source(str(path))).unlink(missing_ok=True)

    def _check(self) -> None:
        """The copy is what is imported, wherever a process is started."""
        found = subprocess.run(
            [sys.executable, "-c", _PLACE], cwd="/", env=self._env, capture_output=True, text=True, check=True
        )
        wrong = [line for line in found.stdout.splitlines() if not Path(line).is_relative_to(self._root)]
        if wrong:
            raise SystemExit(f"imported from elsewhere than the copy: {wrong}")


def _files() -> list[str]:
    """What git knows or would take, as it is here now, and the stubs that are made from the protos."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    stubs = [str(path.relative_to(ROOT)) for path in ROOT.glob("hearth/**/v1/*_pb2*.py*")]
    names = {name for name in listed.stdout.split("\0") if name} | set(stubs)
    return sorted(name for name in names if (ROOT / name).is_file())


def _show(mutations: Sequence[Mutation], sound: Mapping[str, Verdict], copy: Copy) -> int:
    """Print a line for each of them as it comes; how many did not do what they should."""
    wrong = 0
    for mutation in mutations:
        begun = time.monotonic()
        verdict = sound[mutation.test]
        if verdict.kind == "green":
            verdict = copy.mutated(mutation)
            shown = verdict.kind
        else:
            shown = "unsound"
        wrong += shown != "red"
        name = mutation.test.partition("::")[2]
        mark = " " if shown == "red" else "!"
        print(f"{mark} {mutation.code}  {shown:<7} {time.monotonic() - begun:5.1f} s  {name}", flush=True)
        print(f"       {mutation.why if shown == 'red' else verdict.detail}", flush=True)
    return wrong


def main() -> None:
    """See the docstring of the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutations", description=__doc__)
    parser.add_argument("codes", nargs="*", metavar="CODE", help="only these (default: all)")
    wanted = parser.parse_args().codes
    mutations = load()
    unknown = set(wanted) - {mutation.code for mutation in mutations}
    if unknown:
        parser.error(f"no mutation for {', '.join(sorted(unknown))}")
    mutations = [mutation for mutation in mutations if not wanted or mutation.code in wanted]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hearth-mutations-") as directory:
        copy = Copy(Path(directory))
        tests = list(dict.fromkeys(mutation.test for mutation in mutations))
        sound = copy.run(tests)
        print(f"as they are: {sum(verdict.kind == 'green' for verdict in sound.values())} of {len(tests)} tests pass")
        wrong = _show(mutations, sound, copy)
    print(f"{len(mutations) - wrong} of {len(mutations)} went red, {time.monotonic() - begun:.0f} s")
    if wrong:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
