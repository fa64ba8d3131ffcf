"""An edit as the lines that it changes. Pure, and as cheap as its texts are long, whatever is in them.

Finding the shortest difference of lines that repeat takes time that grows with the cube of their number, and an agent
tells of an edit again in each update. So only what differs is compared, and only where that is little work.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import takewhile

# A difference of larger texts costs more than it shows.
MAX_CHARACTERS = 64 * 1024
# Of the search for what lines have in common: in all, for any edit, and for each character of it.
MAX_STEPS = 500_000
_STEPS = 5_000
_STEPS_PER_CHARACTER = 20
_CONTEXT = 3

_Hunk = Sequence[tuple[str, int, int, int, int]]


def difference(path: str, before: str, after: str, *, steps: int = MAX_STEPS) -> str:
    """A unified diff; empty when no line differs, and only the sizes when the texts are large.

    Where the search for lines that stay would take more than `steps`, all between the first line that differs and the
    last one counts as replaced.
    """
    size = len(before) + len(after)
    if size > MAX_CHARACTERS:
        return f"{path}: {len(before)} characters replaced by {len(after)}"
    old, new = before.splitlines(), after.splitlines()
    first = _common(old, new)
    last = _common(old[first:][::-1], new[first:][::-1])
    if first + last == len(old) == len(new):
        return ""
    start, end = max(0, first - _CONTEXT), max(0, last - _CONTEXT)
    old, new = old[start : len(old) - end], new[start : len(new) - end]
    hunks: Iterable[_Hunk] = [_replaced(len(old), len(new), first - start, last - end)]
    if _work(old, new) <= min(steps, _STEPS + _STEPS_PER_CHARACTER * size):
        hunks = difflib.SequenceMatcher(None, old, new).get_grouped_opcodes(_CONTEXT)
    lines = [f"--- {path}", f"+++ {path}"]
    for hunk in hunks:
        (_, old_from, _, new_from, _), (_, _, old_to, _, new_to) = hunk[0], hunk[-1]
        lines.append(f"@@ -{_range(start, old_from, old_to)} +{_range(start, new_from, new_to)} @@")
        for tag, old_from, old_to, new_from, new_to in hunk:
            if tag == "equal":
                lines += [f" {line}" for line in old[old_from:old_to]]
            else:
                lines += [f"-{line}" for line in old[old_from:old_to]]
                lines += [f"+{line}" for line in new[new_from:new_to]]
    return "\n".join(lines)


def _common(old: Sequence[str], new: Sequence[str]) -> int:
    """How many lines are the same at the beginning."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(old, new, strict=False)))


def _work(old: Sequence[str], new: Sequence[str]) -> int:
    """The most steps that the search may take: at worst it finds one line each time it goes through all equal pairs."""
    counts = Counter(new)
    pairs = sum(counts[line] for line in old)
    return (len(old) + len(new) + pairs) * min(len(old), len(new))


def _replaced(old: int, new: int, before: int, after: int) -> _Hunk:
    """All lines but the context at both ends."""
    return [
        ("equal", 0, before, 0, before),
        ("replace", before, old - after, before, new - after),
        ("equal", old - after, old, new - after, new),
    ]


def _range(offset: int, first: int, end: int) -> str:
    """Lines as the head of a hunk names them: counted from 1, and none by the line before it."""
    count = end - first
    return f"{offset + first + 1}" if count == 1 else f"{offset + first + bool(count)},{count}"
