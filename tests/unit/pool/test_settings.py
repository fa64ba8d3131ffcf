"""Settings of the pool: what is wrong is named at the start, not found out in the middle of a turn."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
from pydantic import ValidationError

from services.chassis.settings import problems
from services.pool.settings import PoolSettings


@pytest.fixture(autouse=True)
def given(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.setenv("HEARTH_POSTGRES_DSN", "postgresql://nobody@127.0.0.1/none")
    return monkeypatch


def test_output_that_waits_goes_to_a_directory_that_is_there(given: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given.setenv("HEARTH_SPILL_DIR", str(tmp_path))
    assert PoolSettings().spill_dir == str(tmp_path)  # type: ignore[call-arg]
    given.setenv("HEARTH_SPILL_DIR", str(tmp_path / "nowhere"))
    with pytest.raises(ValidationError) as caught:
        PoolSettings()  # type: ignore[call-arg]
    said = "\n".join(problems(PoolSettings, caught.value))
    assert "HEARTH_SPILL_DIR" in said
    assert "no directory that can be written to" in said


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("HEARTH_REPLICA_GAP", "3"),
        ("HEARTH_REPLICA_DEAD_AFTER", "15"),
        ("HEARTH_REPLICA_BEAT_EVERY", "20"),
        ("HEARTH_REPLICA_ADDRESS", "pool.example.com"),
    ],
)
def test_replicas_that_could_not_tell_a_pause_from_a_death_are_not_started(
    given: pytest.MonkeyPatch, name: str, value: str
) -> None:
    PoolSettings()  # type: ignore[call-arg]
    given.setenv(name, value)
    with pytest.raises(ValidationError):
        PoolSettings()  # type: ignore[call-arg]


def test_others_reach_a_replica_where_it_listens_or_where_it_is_told(given: pytest.MonkeyPatch) -> None:
    settings = PoolSettings()  # type: ignore[call-arg]
    assert settings.reached_at("10.0.0.4:7400") == "10.0.0.4:7400"
    # An address that means every interface is none that others can call.
    assert settings.reached_at("0.0.0.0:7400") == f"{socket.gethostname()}:7400"
    given.setenv("HEARTH_REPLICA_ADDRESS", "pool-1.internal:7400")
    assert PoolSettings().reached_at("0.0.0.0:7400") == "pool-1.internal:7400"  # type: ignore[call-arg]
