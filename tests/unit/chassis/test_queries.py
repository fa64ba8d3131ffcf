"""Named SQL: each block by its name, mistakes in the file told at once."""

from __future__ import annotations

import pytest

from services.chassis.postgres import Queries


def test_blocks_by_name() -> None:
    queries = Queries(
        "-- a comment before the first\n-- name: one\nSELECT 1;\n\n--  name:  two_b\n-- why\nSELECT\n  2;\n", "x.sql"
    )
    assert queries.names == {"one", "two_b"}
    assert queries.one == "SELECT 1;"
    assert queries.two_b == "-- why\nSELECT\n  2;"


def test_an_unknown_name_says_where_it_was_looked_for() -> None:
    with pytest.raises(AttributeError, match=r"x\.sql has no query named three"):
        _ = Queries("-- name: one\nSELECT 1", "x.sql").three


@pytest.mark.parametrize(
    ("text", "words"),
    [("-- name: one\nA\n-- name: one\nB", "one is defined twice"), ("-- name: one\n-- name: two\nB", "one is empty")],
)
def test_a_malformed_file_is_refused(text: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Queries(text, "x.sql")


def test_from_a_package() -> None:
    assert Queries.load("tests.support.sample").names == {"visited", "sleep"}
