"""The guards that are taken back are still where they were, and so are the tests that see it. Nothing is run."""

from __future__ import annotations

import dataclasses

import pytest

from scripts import catalogue
from scripts.failures import CATALOGUE, SECTIONS
from tests.mutations import ROOT, Mutation, load

MUTATIONS = load()
LUA = "services/relay/ingress.lua"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.code)
def test_a_guard_is_in_its_place_and_a_named_test_sees_it(mutation: Mutation) -> None:
    mutation.applied((ROOT / mutation.file).read_text())
    failures = {failure.code: failure for failure in catalogue.load(CATALOGUE)}
    assert mutation.test in failures[mutation.code].tests
    path, _, function = mutation.test.partition("::")
    assert function in catalogue.written(ROOT / path)
    assert mutation.why.endswith(".")


def test_every_section_and_every_part_has_some() -> None:
    assert {mutation.code[0] for mutation in MUTATIONS} == set(SECTIONS)
    parts = ("services/history/", "services/relay/", "services/chassis/", "hearth/_writer.py", "hearth/watch.py")
    assert [part for part in parts if not any(found.file.startswith(part) for found in MUTATIONS)] == []


def test_what_cannot_be_applied_is_told() -> None:
    sound = Mutation("R01", "a.py", "one", "two", "tests/x.py::test_x", "It breaks.")
    assert sound.applied("one + 1") == "two + 1"
    for text, change, words in (
        ("three", {}, "0 times"),
        ("one + one", {}, "2 times"),
        ("one", {"replace": "one"}, "changes nothing"),
        ("one", {"replace": "("}, "does not parse"),
    ):
        with pytest.raises(ValueError, match=words):
            dataclasses.replace(sound, **change).applied(text)
    assert dataclasses.replace(sound, file=LUA, replace="(").applied("one") == "("
