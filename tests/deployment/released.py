"""The release before this one: to run from, and its contracts."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

RELEASES = Path(__file__).parent / "releases"

_CONTRACTS = """
import importlib, pathlib, re, sys
from google.protobuf import descriptor_pb2
import hearth
root = pathlib.Path(hearth.__file__).parent
found = descriptor_pb2.FileDescriptorSet()
seen = set()

def add(file):
    if file.name not in seen:
        seen.add(file.name)
        for other in file.dependencies:
            add(other)
        file.CopyToProto(found.file.add())

for path in sorted(root.glob("*/v1/*_pb2.py")):
    add(importlib.import_module(".".join(path.relative_to(root.parent).with_suffix("").parts)).DESCRIPTOR)
def named(message):
    # Python's descriptors leave out the names in JSON, which are those that buf compares.
    for field in (*message.field, *message.extension):
        field.json_name = re.sub("_+(.)", lambda letter: letter[1].upper(), field.name)
    for inner in message.nested_type:
        named(inner)

for file in found.file:
    for message in file.message_type:
        named(message)
sys.stdout.buffer.write(found.SerializeToString())
"""


def version() -> str:
    """Of it."""
    return _wheel().name.split("-")[1]


def unpacked(directory: Path) -> Path:
    """It, below `directory`; as PYTHONPATH it comes before this tree."""
    with zipfile.ZipFile(_wheel()) as file:
        file.extractall(directory)
    return directory


def runnable(directory: Path) -> Path:
    """The same, with what it needs and this tree does not any more; in versions that go with what is installed."""
    place = unpacked(directory)
    missing = [str(one) for one in _requirements(place) if not _is_installed(one)]
    if missing:
        installed = place / "installed.txt"
        installed.write_text("".join(f"{one.metadata['Name']}=={one.version}\n" for one in metadata.distributions()))
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--target", place, "--constraint", installed, *missing], check=True)
    return place


def _requirements(unpacked_to: Path) -> Iterator[Requirement]:
    (found,) = metadata.distributions(name="hearth", path=[str(unpacked_to)])
    for line in found.requires or ():
        one = Requirement(line)
        if one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in ("", "embedded")):
            yield one


def _is_installed(wanted: Requirement) -> bool:
    try:
        return wanted.specifier.contains(metadata.version(wanted.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


def contracts(unpacked_to: Path) -> bytes:
    """Its protos as a serialized FileDescriptorSet."""
    environment = {**os.environ, "PYTHONPATH": str(unpacked_to)}
    done = subprocess.run(
        [sys.executable, "-c", _CONTRACTS], env=environment, cwd=unpacked_to, capture_output=True, check=True
    )
    return done.stdout


def _wheel() -> Path:
    (wheel,) = RELEASES.glob("*.whl")
    return wheel
