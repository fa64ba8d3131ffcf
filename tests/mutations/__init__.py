"""Guards taken back: for known failures, the change that brings one back, and the test that must go red with it."""

from __future__ import annotations

import ast
import tomllib
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(__file__).with_name("mutations.toml")


@dataclass(frozen=True, slots=True)
class Mutation:
    """In `file`, below the root of the tree, `find` becomes `replace`; `test` is a node id without parameters."""

    code: str
    file: str
    find: str
    replace: str
    test: str
    why: str

    def applied(self, text: str) -> str:
        """`text` of the file, changed. Raises ValueError when that is not possible in exactly one place."""
        found = text.count(self.find)
        if found != 1:
            raise ValueError(f"{self.code}: what it changes stands {found} times in {self.file}")
        changed = text.replace(self.find, self.replace)
        if changed == text:
            raise ValueError(f"{self.code} changes nothing")
        if self.file.endswith(".py"):
            try:
                ast.parse(changed)
            except SyntaxError as error:
                raise ValueError(f"{self.code}: {self.file} does not parse any more: {error}") from None
        return changed


def load(path: Path = DATA) -> list[Mutation]:
    """All of them, in the order of the file."""
    with path.open("rb") as file:
        return [Mutation(code, **entry) for code, entry in tomllib.load(file).items()]
