"""Which cases of a kind `make test` runs: a few. `make exhaustive` runs the others, which are marked `exhaustive`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def sampled(values: Iterable[Any], *, every: int) -> list[Any]:
    """Parameters for `parametrize`: the first of each `every` runs always, the others when all are asked for."""
    return [
        value if place % every == 0 else pytest.param(value, marks=pytest.mark.exhaustive)
        for place, value in enumerate(values)
    ]
