"""Checks of request fields, shared, so that every service refuses the same input with the same words.

Each check returns the usable value or raises `InvalidArgument` that names the field. None of them does IO.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable
from typing import TypeVar

from services.chassis.errors import FieldViolation, InvalidArgument, invalid

_ID = re.compile(r"[A-Za-z0-9_.:-]{1,128}")
_UUID = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}", re.IGNORECASE)
_REQUEST_ID_MAX = 255
_INT64_MAX = 2**63 - 1

_T = TypeVar("_T")


def key_part(field: str, value: str) -> str:
    """A project or session id: 1 to 128 characters of `A-Z a-z 0-9 _ . : -`."""
    if not value:
        raise invalid(field, "must not be empty")
    if _ID.fullmatch(value) is None:
        raise invalid(field, "must be 1 to 128 characters of A-Z a-z 0-9 _ . : -")
    return value


def session_key(project: str, session: str, *, field: str = "session") -> tuple[str, str]:
    """A (project, session) key; `field` is the path of the key message, its parts are named below it."""
    checks = Violations()
    key = (
        checks.take(key_part, f"{field}.project", project),
        checks.take(key_part, f"{field}.session", session),
    )
    checks.raise_if_any()
    return key


def uuid_text(field: str, value: str) -> str:
    """A uuid in its 36 character form, returned in lower case. Braces, `urn:` and bare hex are refused."""
    if not value:
        raise invalid(field, "must not be empty; it must be a uuid")
    if _UUID.fullmatch(value) is None:
        raise invalid(field, "must be a uuid of the form 8-4-4-4-12 hexadecimal digits")
    return value.lower()


def uuid_value(field: str, value: str) -> uuid.UUID:
    """As `uuid_text`, but the object that asyncpg takes."""
    return uuid.UUID(uuid_text(field, value))


def request_id(value: str, *, field: str = "request_id") -> str:
    """The caller's key of a request: 1 to 255 printable characters."""
    if not value:
        raise invalid(field, "must not be empty: it makes a retry of this request safe")
    if len(value) > _REQUEST_ID_MAX:
        raise invalid(field, f"must be at most {_REQUEST_ID_MAX} characters")
    if not value.isprintable():
        raise invalid(field, "must hold printable characters only")
    return value


def page_size(value: int, *, default: int, maximum: int, field: str = "page_size") -> int:
    """How many items a page may hold: 0 means `default`, more than `maximum` means `maximum`, negative is refused."""
    if value < 0:
        raise invalid(field, "must not be negative")
    return min(value or default, maximum)


def length(field: str, value: str | bytes, *, maximum: int, minimum: int = 0) -> None:
    """Refuse a value whose UTF-8 form has fewer than `minimum` or more than `maximum` bytes."""
    size = len(value.encode() if isinstance(value, str) else value)
    if size < minimum:
        raise invalid(field, "must not be empty" if minimum == 1 else f"must be at least {minimum} bytes")
    if size > maximum:
        raise invalid(field, f"must be at most {maximum} bytes, it has {size}", reason="TOO_LARGE")


def number(field: str, value: int, *, minimum: int = 0, maximum: int = _INT64_MAX) -> int:
    """Refuse a number outside of [minimum, maximum]; the default upper bound is what a Postgres bigint holds."""
    if not minimum <= value <= maximum:
        raise invalid(field, f"must be between {minimum} and {maximum}")
    return value


class Violations:
    """Gathers what is wrong with a request, so that one answer names every wrong field.

    `take` runs a check and keeps its refusal; the value it then returns is the one given, and must not be used before
    `raise_if_any`.
    """

    def __init__(self) -> None:
        self._found: list[FieldViolation] = []
        self._reason = "INVALID_FIELD"

    def add(self, field: str, description: str, *, reason: str = "INVALID_FIELD") -> None:
        """Note that `field` is wrong. The reason of the answer is that of the first one."""
        if not self._found:
            self._reason = reason
        self._found.append((field, description))

    def take(self, check: Callable[[str, _T], _T], field: str, value: _T) -> _T:
        """`check(field, value)`, with its refusal gathered."""
        try:
            return check(field, value)
        except InvalidArgument as refusal:
            for found, description in refusal.field_violations:
                self.add(found, description, reason=refusal.reason)
            return value

    def raise_if_any(self) -> None:
        """Raise one `InvalidArgument` that names all of them."""
        if self._found:
            message = "; ".join(f"{field}: {description}" for field, description in self._found)
            raise InvalidArgument(message, reason=self._reason, field_violations=tuple(self._found))
