"""The file of spans is bounded, whoever shares it, and loses no span of a batch while it changes."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider

from services.chassis.span_file import OLDER, SpanFile


def batch(first: int, count: int = 4) -> Sequence[ReadableSpan]:
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("test")
    made = [tracer.start_span(f"work {number}") for number in range(first, first + count)]
    for span in made:
        span.end()
    return [span for span in made if isinstance(span, ReadableSpan)]


def names(path: Path) -> list[str]:
    return [json.loads(line)["name"] for line in path.read_text().splitlines()]


def test_a_full_file_is_set_aside_and_the_one_before_is_gone(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    older = tmp_path / f"spans.jsonl{OLDER}"
    # One batch fills it.
    file = SpanFile(path, max_bytes=500)
    file.export(batch(0))
    assert (len(names(path)), older.exists()) == (4, False)
    file.export(batch(4))
    assert (names(older), names(path)) == ([f"work {n}" for n in range(4)], [f"work {n}" for n in range(4, 8)])
    file.export(batch(8))
    assert (names(older), names(path)) == ([f"work {n}" for n in range(4, 8)], [f"work {n}" for n in range(8, 12)])
    assert sorted(found.name for found in tmp_path.iterdir()) == [path.name, older.name]
    file.shutdown()


def test_a_torn_line_costs_no_other_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "spans.jsonl"
    # As a process leaves it that was killed while it wrote.
    path.write_text('{"trace_id": "')
    file = SpanFile(path, max_bytes=1_000_000)
    file.export(batch(0, 1))
    write = os.write

    def full(descriptor: int, data: memoryview) -> int:
        monkeypatch.setattr(os, "write", no_space)
        return write(descriptor, data[:20])

    def no_space(*_: object) -> int:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="no space"):
        file.export(batch(1, 1))
    monkeypatch.setattr(os, "write", write)
    file.export(batch(2, 2))
    file.shutdown()
    torn, first, also_torn, *rest = path.read_text().splitlines()
    for line in (torn, also_torn):
        with pytest.raises(ValueError):
            json.loads(line)
    assert [json.loads(line)["name"] for line in (first, *rest)] == ["work 0", "work 2", "work 3"]


def test_those_who_share_a_file_change_together(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    one, other = SpanFile(path, max_bytes=500), SpanFile(path, max_bytes=500)
    one.export(batch(0))
    other.export(batch(4))  # sets it aside
    one.export(batch(8))  # finds the fresh one full, and sets it aside in turn
    assert names(path) == [f"work {n}" for n in range(8, 12)]
    assert names(tmp_path / f"spans.jsonl{OLDER}") == [f"work {n}" for n in range(4, 8)]
    other.export(batch(12, 1))
    assert names(path) == ["work 12"]
    # Somebody tidied up: it is made again.
    path.unlink()
    one.export(batch(13, 1))
    assert names(path) == ["work 13"]
    one.shutdown()
    other.shutdown()
