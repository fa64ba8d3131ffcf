"""Finding a trace in the files: by execution, by trace, the latest; and what is half written is not read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hearth.tracing.store import NotFound, TraceStore

A, B = "a" * 32, "b" * 32
ONE, OTHER = "11111111-0000-4000-8000-000000000000", "11112222-0000-4000-8000-000000000000"


def line(trace_id: str, span_id: str, name: str = "work", start: int = 0, **more: Any) -> str:
    made: dict[str, Any] = {
        "trace_id": trace_id,
        "span_id": span_id,
        "parent_id": None,
        "name": name,
        "kind": "INTERNAL",
        "start_ns": start,
        "end_ns": start + 5,
        "status": "UNSET",
        "status_message": None,
        "attributes": {},
        "links": [],
        "service": "hearth-pool",
        "instance": "x",
    }
    return json.dumps({**made, **more}) + "\n"


@pytest.fixture
def store(tmp_path: Path) -> TraceStore:
    """Two turns, in the files of two services, one of them partly in the file that was set aside."""
    (tmp_path / "pool.jsonl.1").write_text(
        line(A, "01", "turn", 10, attributes={"hearth.execution": ONE})
        + line(A, "02", "work", 12, status="ERROR", status_message="TURN_LIMIT")
    )
    (tmp_path / "pool.jsonl").write_text(
        line(B, "03", "turn", 20, attributes={"hearth.execution": OTHER})
        + line(A, "04", "late", 30, status="ERROR")
        # Being written just now.
        + line(B, "05", "torn", 40)[:-20]
    )
    (tmp_path / "history.jsonl").write_text(
        line(B, "06", "history.append", 25, links=[{"trace_id": A, "span_id": "02"}], service="hearth-history")
    )
    return TraceStore(tmp_path)


def ids(store: TraceStore, wanted: str) -> list[str]:
    return [span.span_id for span in store.find(wanted)]


def test_a_trace_is_found_by_every_name_that_it_has(store: TraceStore) -> None:
    assert ids(store, ONE) == ids(store, ONE[:6]) == ids(store, A) == ids(store, "AAAA") == ["01", "02", "04"]
    assert ids(store, OTHER) == ids(store, "latest") == ["03", "06"]


@pytest.mark.parametrize(
    ("wanted", "why"), [("1111", "2 traces"), ("111", "too short"), ("deadbeef", "no execution or trace")]
)
def test_what_is_not_there_or_not_clear_is_said(store: TraceStore, wanted: str, why: str) -> None:
    with pytest.raises(NotFound, match=why):
        store.find(wanted)


def test_a_torn_line_hides_no_other_one(tmp_path: Path) -> None:
    turn = {"attributes": {"hearth.execution": ONE}}
    whole = line(A, "01", "turn", 10, **turn)
    # Another process wrote behind what one that was killed left, or part of a line was lost.
    torn = [line(A, "02", "turn", 20, **turn)[:120] + line(A, "03", "turn", 30, **turn), f'{{"trace_id": "{A}"}}\n']
    (tmp_path / "pool.jsonl").write_text(torn[0] + whole + "".join(torn) + line(A, "04", "work", 40))
    store = TraceStore(tmp_path)
    assert ids(store, ONE) == ids(store, A) == ids(store, "latest") == ["01", "04"]
    assert [span.span_id for span in store.all()] == ["01", "04"]


def test_an_empty_store_has_no_latest_turn(tmp_path: Path) -> None:
    for directory in (tmp_path, tmp_path / "missing"):
        with pytest.raises(NotFound, match="no turn"):
            TraceStore(directory).find("latest")


def test_a_span_tells_its_error_and_what_it_is_linked_to(store: TraceStore) -> None:
    turn, work, late = store.find(A)
    assert (turn.error, work.error, late.error) == ("", "TURN_LIMIT", "error")
    assert (turn.execution, work.execution, turn.service, turn.nanoseconds) == (ONE, "", "pool", 5)
    linked = store.linked(store.find(B))
    assert {span_id: found.name for span_id, found in linked.items()} == {"02": "work"}
