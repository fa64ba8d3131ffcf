"""Settings of the pool: what is wrong is named at the start, not found out in the middle of a turn."""

from __future__ import annotations

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
