"""A sealed value opens with its key, in its place, and nowhere else; keys are read without being repeated."""

from __future__ import annotations

import os

import pytest

from services.pool.sealing import KEY_BYTES, NotOpened, Sealer, new_key, parse_keys

OLD, NEW = os.urandom(KEY_BYTES), os.urandom(KEY_BYTES)


def test_what_is_sealed_opens_in_its_place_only() -> None:
    sealer = Sealer([NEW])
    sealed = sealer.seal(b"value", b"place")
    assert b"value" not in sealed
    assert sealer.open(sealed, b"place") == b"value"
    with pytest.raises(NotOpened):
        sealer.open(sealed, b"other place")
    assert sealer.seal(b"value", b"place") != sealed


@pytest.mark.parametrize("cut", [0, 1, 4, 5, 16, 20, -1])
def test_what_is_cut_or_changed_does_not_open(cut: int) -> None:
    sealer = Sealer([NEW])
    sealed = sealer.seal(b"value", b"")
    with pytest.raises(NotOpened):
        sealer.open(sealed[:cut], b"")
    changed = bytearray(sealed)
    changed[cut] ^= 1
    with pytest.raises(NotOpened):
        sealer.open(bytes(changed), b"")


def test_a_key_is_changed_by_putting_a_new_one_in_front() -> None:
    before, between, after = Sealer([OLD]), Sealer([NEW, OLD]), Sealer([NEW])
    sealed = before.seal(b"value", b"")
    assert between.open(sealed, b"") == b"value"
    assert not between.newest(sealed)
    anew = between.seal(b"value", b"")
    assert between.newest(anew)
    assert after.open(anew, b"") == b"value"
    with pytest.raises(NotOpened, match="HEARTH_SECRET_KEY"):
        after.open(sealed, b"")


def test_marks_tell_requests_apart_over_a_change_of_the_key() -> None:
    mark = Sealer([OLD]).mark(b"request")
    between = Sealer([NEW, OLD])
    assert between.marked(mark, b"request")
    assert not between.marked(mark, b"another")
    assert mark != between.mark(b"request")
    # Whose key is gone cannot be compared; then nothing is done twice.
    assert Sealer([NEW]).marked(mark, b"another")


def test_keys_are_read_and_shown_nowhere() -> None:
    one, two = new_key(), new_key()
    keys = parse_keys(f"{one}, {two.rstrip('=')},")
    assert [len(key) for key in keys] == [KEY_BYTES, KEY_BYTES]
    assert parse_keys("") == []
    shown = f"{Sealer(keys)!r} {Sealer(keys)}"
    assert not any(key.hex() in shown or repr(key) in shown for key in keys)


@pytest.mark.parametrize("text", ["short", "x" * 43 + "!", "AAAA", "A" * 88])
def test_a_key_that_is_none_is_refused_without_being_repeated(text: str) -> None:
    with pytest.raises(ValueError, match="key 2 must be 32 bytes") as caught:
        parse_keys(f"{new_key()},{text}")
    assert text not in str(caught.value)
