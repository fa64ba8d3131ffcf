"""Settings of the pool that an operator should know of."""

from __future__ import annotations

import pytest

from services.pool.settings import PoolSettings
from services.pool.warnings import warnings


def settings(**values: object) -> PoolSettings:
    return PoolSettings.model_validate({"postgres_dsn": "postgresql://x", **values})


def test_the_defaults_need_no_warning() -> None:
    assert warnings(settings()) == ()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"default_permission": "allow"}, "HEARTH_DEFAULT_PERMISSION=allow"),
        ({"local_warm_window": 0}, "no turn on local is a warm one"),
        ({"local_warm_window": 7200}, "HEARTH_LOCAL_WARM_WINDOW=7200"),
        ({"stop_window": 7200}, "HEARTH_STOP_WINDOW=7200"),
    ],
)
def test_what_may_cost_is_named(values: dict[str, object], words: str) -> None:
    (warning,) = warnings(settings(**values))
    assert words in warning
