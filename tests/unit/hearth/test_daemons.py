"""Ports for servers that are started a moment later."""

from __future__ import annotations

from pathlib import Path

import pytest

from hearth.embedded import daemons


@pytest.mark.parametrize(
    ("told", "from_", "below"),
    [("32768\t60999\n", 12_000, 32_768), ("1024 65535", 12_000, 12_020), ("", 12_000, 12_020)],
)
def test_a_port_is_none_that_the_system_hands_out(
    told: str, from_: int, below: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "range").write_text(told)
    monkeypatch.setattr(daemons, "_HANDED_OUT", tmp_path / "range")
    assert from_ <= daemons.free_port() < below
