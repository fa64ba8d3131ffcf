"""Where the next step of a session is made, and who else is told: decided from its rows alone."""

from __future__ import annotations

import pytest

from services.pool.runners import Place, Standing, place, whom_to_tell

ME, OTHER = "me", "other"
UNPICKED = Standing(None, 1, "e", pending=True)


@pytest.mark.parametrize(
    ("standing", "where", "told"),
    [
        (None, Place.NOWHERE, None),
        (Standing(None, 3), Place.NOWHERE, None),
        # Whoever keeps an agent of an idle session has nothing to do.
        (Standing(OTHER, 3), Place.NOWHERE, None),
        (UNPICKED, Place.HERE, None),
        (Standing(ME, 1, "e", pending=True), Place.HERE, None),
        (Standing(OTHER, 1, "e", pending=True), Place.OFFERED, OTHER),
        # Picked up, whether its prompt was sent or not.
        (Standing(ME, 1, "e", ME, pending=True), Place.HERE, None),
        (Standing(ME, 1, "e", ME), Place.HERE, None),
        (Standing(OTHER, 1, "e", OTHER, pending=True), Place.THERE, OTHER),
        (Standing(OTHER, 1, "e", OTHER), Place.THERE, OTHER),
        # The pool ends it: who holds the session may be driving it still.
        (Standing(OTHER, 2, "e", ending=True), Place.NOWHERE, OTHER),
        (Standing(ME, 2, "e", ending=True), Place.NOWHERE, None),
        (Standing(None, 2, "e", pending=True, ending=True), Place.NOWHERE, None),
        # At work without a driver: it is being taken over.
        (Standing(None, 2, "e"), Place.NOWHERE, None),
    ],
)
def test_where_the_next_step_is_made(standing: Standing | None, where: Place, told: str | None) -> None:
    assert place(standing, ME) is where
    assert whom_to_tell(standing, ME) == told
