"""A text that must not be shown: tokens, keys, connection strings, values of credentials."""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, NoReturn, Self

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema

MASK = "**********"


class Secret:
    """Holds a text and shows `**********` wherever it is printed, formatted, logged or dumped.

    `reveal` is the only way to the text; call it where the text leaves the process and keep no copy. False when empty.
    It cannot be pickled. A field of a pydantic model may have this type; it takes a text.
    """

    __slots__ = ("_hidden",)

    def __init__(self, text: str = "") -> None:
        self._hidden = text

    def reveal(self) -> str:
        """The text itself."""
        return self._hidden

    def __bool__(self) -> bool:
        return bool(self._hidden)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Secret):
            return NotImplemented
        return hmac.compare_digest(self._hidden.encode(), other._hidden.encode())

    def __hash__(self) -> int:
        return hash((Secret, self._hidden))

    def __repr__(self) -> str:
        return MASK

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        return format(MASK, spec)

    def __copy__(self) -> Self:
        return self

    def __deepcopy__(self, _memo: dict[int, Any]) -> Self:
        return self

    def __reduce_ex__(self, _protocol: object) -> NoReturn:
        raise TypeError("a secret is not written down")

    @classmethod
    def __get_pydantic_core_schema__(cls, _source: object, _handler: GetCoreSchemaHandler) -> CoreSchema:
        # Here and not above: programs that only call services start without pydantic.
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(
            _taken, serialization=core_schema.plain_serializer_function_ser_schema(str)
        )


NO_SECRET: Final = Secret()


def _taken(value: object) -> Secret:
    if isinstance(value, Secret):
        return value
    if not isinstance(value, str):
        raise ValueError("must be a text")
    return Secret(value)


def hidden(values: Mapping[str, str]) -> dict[str, Secret]:
    """Each value as a secret."""
    return {name: Secret(value) for name, value in values.items()}


def revealed(values: Mapping[str, Secret]) -> dict[str, str]:
    """The texts of secrets, for what they are given to: as `Secret.reveal`."""
    return {name: value.reveal() for name, value in values.items()}
