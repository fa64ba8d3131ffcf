"""Field checks: each wrong value is refused with the path of its field, and right ones pass unchanged."""

from __future__ import annotations

import uuid

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.chassis import fields
from services.chassis.errors import InvalidArgument

ALPHABET = "ABCXYZabcxyz0189_.:-"


def refused_fields(error: InvalidArgument) -> list[str]:
    return [field for field, _ in error.field_violations]


@given(st.text(ALPHABET, min_size=1, max_size=128))
def test_good_ids_pass(value: str) -> None:
    assert fields.key_part("project", value) == value


@pytest.mark.parametrize("value", ["", "a" * 129, "a b", "a/b", "é", "a\n", "a\0", "*"])
def test_bad_ids_are_named(value: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        fields.key_part("session.project", value)
    assert refused_fields(caught.value) == ["session.project"]
    assert caught.value.reason == "INVALID_FIELD"


def test_both_parts_of_a_key_are_named_at_once() -> None:
    assert fields.session_key("p", "s") == ("p", "s")
    with pytest.raises(InvalidArgument) as caught:
        fields.session_key("", "x y", field="sets[0].session")
    assert refused_fields(caught.value) == ["sets[0].session.project", "sets[0].session.session"]


@given(st.uuids())
def test_uuids_pass_in_either_case(value: uuid.UUID) -> None:
    assert fields.uuid_text("id", str(value).upper()) == str(value)
    assert fields.uuid_value("id", str(value)) == value


@pytest.mark.parametrize(
    "value", ["", "1", "0" * 32, "{" + str(uuid.UUID(int=0)) + "}", "urn:uuid:" + str(uuid.UUID(int=0))]
)
def test_other_forms_of_a_uuid_are_refused(value: str) -> None:
    with pytest.raises(InvalidArgument):
        fields.uuid_text("execution_id", value)


def test_request_id() -> None:
    assert fields.request_id("r" * 255) == "r" * 255
    for wrong in ("", "r" * 256, "a\tb", "\0"):
        with pytest.raises(InvalidArgument) as caught:
            fields.request_id(wrong)
        assert refused_fields(caught.value) == ["request_id"]


def test_page_size_is_bent_not_refused() -> None:
    assert [fields.page_size(size, default=50, maximum=100) for size in (0, 1, 100, 101)] == [50, 1, 100, 100]
    with pytest.raises(InvalidArgument):
        fields.page_size(-1, default=50, maximum=100)


def test_length_counts_bytes() -> None:
    fields.length("text", "é" * 5, maximum=10)
    with pytest.raises(InvalidArgument) as caught:
        fields.length("text", "é" * 6, maximum=10)
    assert caught.value.reason == "TOO_LARGE"
    with pytest.raises(InvalidArgument):
        fields.length("text", b"", minimum=1, maximum=10)


def test_numbers_fit_a_bigint() -> None:
    assert fields.number("epoch", 2**63 - 1) == 2**63 - 1
    for wrong in (-1, 2**63):
        with pytest.raises(InvalidArgument):
            fields.number("epoch", wrong)


def test_violations_are_gathered() -> None:
    checks = fields.Violations()
    checks.raise_if_any()
    assert checks.take(fields.uuid_text, "a", str(uuid.UUID(int=1))) == str(uuid.UUID(int=1))
    checks.take(fields.uuid_text, "b", "x")
    checks.add("c", "too many", reason="TOO_LARGE")
    with pytest.raises(InvalidArgument) as caught:
        checks.raise_if_any()
    assert refused_fields(caught.value) == ["b", "c"]
    assert caught.value.reason == "INVALID_FIELD"
