"""A secret shows in nothing that prints, formats, dumps or keeps it, and in a traceback with locals neither."""

from __future__ import annotations

import copy
import dataclasses
import json
import logging
import pickle
import sys
import traceback

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from hearth.channel import kept, token_of
from hearth.client import Client
from hearth.secret import MASK, Secret, hidden, revealed
from services.chassis.logs import setup_logging

TEXT = "planted"


@dataclasses.dataclass(frozen=True)
class Holder:
    name: str
    secret: Secret


class Model(BaseModel):
    model_config = ConfigDict(hide_input_in_errors=True)

    secret: Secret
    many: dict[str, Secret] = {}


def test_no_form_of_it_shows_it() -> None:
    secret = Secret(TEXT)
    holder = Holder("n", secret)
    shown = [repr(secret), str(secret), f"{secret}", f"{secret!r}", f"{secret:>20}", "%s" % secret, "{}".format(secret)]  # noqa: UP031, UP032
    shown += [
        repr(holder),
        str(dataclasses.asdict(holder)),
        repr([secret]),
        repr({"k": secret}),
        repr(hidden({"k": TEXT})),
    ]
    shown += [json.dumps({"k": secret}, default=str), repr(Client(token=TEXT)), str(vars(Client(token=TEXT)))]
    assert all(MASK in text or "Client" in text or "_token" in text for text in shown)
    assert not [text for text in shown if TEXT in text]


def test_a_model_takes_a_text_and_shows_none() -> None:
    model = Model.model_validate({"secret": TEXT, "many": {"a": TEXT}})
    assert model.secret.reveal() == model.many["a"].reveal() == TEXT
    for text in (repr(model), str(model.model_dump()), model.model_dump_json()):
        assert TEXT not in text
        assert MASK in text
    with pytest.raises(ValidationError) as caught:
        Model.model_validate({"secret": [TEXT]})
    assert TEXT not in str(caught.value)


def test_it_is_not_written_down() -> None:
    for make in (pickle.dumps, lambda value: json.dumps({"k": value})):
        with pytest.raises(TypeError):
            make(Secret(TEXT))
    assert copy.deepcopy(Secret(TEXT)) == copy.copy(Secret(TEXT)) == Secret(TEXT)


def test_a_traceback_with_locals_does_not_show_it() -> None:
    def fail(secret: Secret) -> None:
        raise RuntimeError(f"cannot use {secret}")

    try:
        fail(Secret("plan" + "ted"))
    except RuntimeError as error:
        kept_frames = error.__traceback__
        found = traceback.TracebackException(RuntimeError, error, kept_frames, capture_locals=True)
    told = "".join(found.format())
    assert MASK in told
    assert "secret = " in told
    assert "'planted'" not in told


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_log_line_does_not_show_it(capfd: pytest.CaptureFixture[str], form: str) -> None:
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    try:
        setup_logging("test", level="INFO", form=form)  # type: ignore[arg-type]
        logging.getLogger("t").info("uses %s", Secret(TEXT), extra={"token": Secret(TEXT), "all": {"a": Secret(TEXT)}})
        sys.stderr.flush()
    finally:
        logging.basicConfig(handlers=before, level=level, force=True)
    told = capfd.readouterr().err
    assert told.count(MASK) == 3
    assert TEXT not in told


def test_it_compares_and_counts_as_a_text() -> None:
    assert Secret(TEXT) == Secret(TEXT) != Secret("other")
    assert Secret(TEXT) != TEXT
    assert len({Secret(TEXT), Secret(TEXT)}) == 1
    assert Secret(TEXT)
    assert not Secret()
    assert revealed(hidden({"a": TEXT})) == {"a": TEXT}


def test_a_token_is_given_as_text_as_secret_or_by_a_function() -> None:
    for token in (TEXT, Secret(TEXT), lambda: TEXT, lambda: Secret(TEXT)):
        assert token_of(token) == token_of(kept(token)) == Secret(TEXT)
