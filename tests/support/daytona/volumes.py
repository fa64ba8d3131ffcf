"""Volumes as directories, and mounts as symbolic links."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Container, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from tests.support.daytona.problems import Problem, bad, timestamp
from tests.support.daytona.sandbox import ORGANIZATION, Mount, new_id

# In the directory of a stand-in: its volumes, and what it holds a lock on as long as it lives.
VOLUMES, LOCK = "volumes", "lock"


@dataclass(slots=True)
class Volume:
    """A volume; its id is the name of its directory."""

    id: str
    name: str
    state: str = "ready"
    created: float = field(default_factory=time.time)
    used: float | None = None

    def shown(self) -> dict[str, Any]:
        """As the API shows it."""
        return {
            "id": self.id,
            "name": self.name,
            "organizationId": ORGANIZATION,
            "state": self.state,
            "createdAt": timestamp(self.created),
            "updatedAt": timestamp(self.created),
            "lastUsedAt": timestamp(self.used) if self.used else None,
            "errorReason": None,
        }


class Volumes:
    """The volumes of the organization, below `directory`, and what is mounted where."""

    def __init__(self, directory: Path, most: int = 100) -> None:
        self._directory = directory
        self._most = most
        self._volumes: dict[str, Volume] = {}
        self._links: dict[str, _Link] = {}

    def all(self) -> Sequence[Volume]:
        """Every volume."""
        return list(self._volumes.values())

    def get(self, identifier: str) -> Volume:
        """By id. Raises a 404 `Problem`."""
        if identifier not in self._volumes:
            raise Problem(404, f"Volume with ID {identifier} not found")
        return self._volumes[identifier]

    def by_name(self, name: str) -> Volume:
        """By name. Raises a 404 `Problem`."""
        for volume in self._volumes.values():
            if volume.name == name:
                return volume
        raise Problem(404, f"Volume with name {name} not found")

    def create(self, name: str) -> Volume:
        """Make one. A name is given once."""
        if any(volume.name == name for volume in self._volumes.values()):
            raise bad(f"Volume with name {name} already exists")
        if len(self._volumes) >= self._most:
            raise Problem(403, f"Volume quota exceeded. Maximum allowed: {self._most}")
        volume = Volume(new_id(), "")
        volume.name = name or volume.id
        self.path(volume.id).mkdir(parents=True)
        self._volumes[volume.id] = volume
        return volume

    def delete(self, identifier: str, used: Container[str]) -> None:
        """Remove one with what is in it, unless it is among those that sandboxes use."""
        volume = self.get(identifier)
        if identifier in used:
            raise Problem(409, "Volume cannot be deleted because it is in use by one or more sandboxes")
        del self._volumes[identifier]
        shutil.rmtree(self.path(volume.id))

    def path(self, identifier: str) -> Path:
        """The directory of a volume: what is in it, seen from outside."""
        return self._directory / identifier

    def check(self, mounts: Sequence[Mount]) -> None:
        """Refuse mounts of volumes that are not there."""
        for mount in mounts:
            if self.get(mount.volume).state != "ready":
                raise bad(f"Volume '{mount.volume}' is not in a ready state")

    def mount(self, owner: str, mounts: Sequence[Mount]) -> None:
        """Make the links of a sandbox. Raises OSError when something else is in the way."""
        for mount in mounts:
            target = self.path(mount.volume) / mount.subpath
            target.mkdir(parents=True, exist_ok=True)
            self.get(mount.volume).used = time.time()
            link = self._links.get(mount.path)
            if link is None:
                link = self._links[mount.path] = _make_link(Path(mount.path), target)
            elif link.target != target:
                # Real sandboxes have a file system each; here a path can mean one thing at a time.
                raise OSError(f"{mount.path} leads to another volume for another sandbox of this stand-in")
            link.owners.add(owner)

    def unmount(self, owner: str) -> None:
        """Take away the links that only this sandbox used."""
        for path, link in list(self._links.items()):
            link.owners.discard(owner)
            if not link.owners:
                del self._links[path]
                link.remove()

    def close(self) -> None:
        """Take away all links."""
        for link in self._links.values():
            link.remove()
        self._links.clear()


@dataclass(slots=True)
class _Link:
    path: Path
    target: Path
    made: Sequence[Path]
    owners: set[str] = field(default_factory=set)

    def remove(self) -> None:
        with suppress(FileNotFoundError):
            self.path.unlink()
        for directory in self.made:
            with suppress(OSError):  # something else is in it by now
                directory.rmdir()


def _make_link(path: Path, target: Path) -> _Link:
    made: list[Path] = []
    for parent in reversed(path.parents):
        if not parent.exists():
            parent.mkdir()
            made.insert(0, parent)
    if path.is_symlink() and _abandoned(path):
        path.unlink()
    if path.is_dir() and not path.is_symlink():
        path.rmdir()
    os.symlink(target, path)
    return _Link(path, target, made)


def _abandoned(link: Path) -> bool:
    """Whether a link was made by a stand-in that has ended, killed before it could take it away."""
    target = Path(os.readlink(link))
    for directory in target.parents:
        lock = directory.parent / LOCK
        if directory.name == VOLUMES and lock.exists():
            with lock.open() as file:
                return locked(file)
    return not link.exists()


def locked(file: IO[str]) -> bool:
    """Lock the lock file of a stand-in's directory as long as it is open; False when a living one has it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
