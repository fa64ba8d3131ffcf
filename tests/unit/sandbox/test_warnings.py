"""Settings of the sandbox service that an operator should know of."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.sandbox.settings import SandboxSettings
from services.sandbox.warnings import warnings


def settings(**values: object) -> SandboxSettings:
    return SandboxSettings.model_validate({"postgres_dsn": "postgresql://x", **values})


def test_the_defaults_need_no_warning() -> None:
    assert warnings(settings()) == ()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"local_warm_window": 0}, "no turn on local is a warm one"),
        ({"local_warm_cap": 0}, "HEARTH_LOCAL_WARM_WINDOW or _WARM_CAP is 0"),
        ({"local_warm_cap": 0, "local_park_stopped": False}, "every turn on local is a cold one"),
        ({"lease": 30}, "HEARTH_LEASE=30"),
        ({"lease": 100}, "longer than 120 s"),
        ({"reconcile_interval": 31}, "HEARTH_RECONCILE_INTERVAL=31"),
    ],
)
def test_what_may_cost_is_named(values: dict[str, object], words: str) -> None:
    (warning,) = warnings(settings(**values))
    assert words in warning


def test_a_provider_without_walls_that_others_reach(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    tokens.write_text("[]")
    (warning,) = warnings(settings(listen="0.0.0.0:7403", auth_file=tokens))
    assert "isolates nothing" in warning


def test_workspaces_that_die_with_their_sandbox() -> None:
    daytona = {"providers": ["daytona"], "default_provider": "daytona", "daytona_api_key": "key"}
    assert warnings(settings(**daytona)) == ()
    (warning,) = warnings(settings(**daytona, daytona_volume="none"))
    assert "HEARTH_DAYTONA_VOLUME" in warning
    (warning,) = warnings(settings(**daytona, daytona_price_running=0))
    assert "what daytona costs is not counted" in warning
