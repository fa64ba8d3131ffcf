"""What goes wrong between the SDK and Daytona, in the words of the port. All of it is decided here.

The SDK tells an HTTP status as a class and an attribute, a lost connection and a time-out as classes of their own, and
everything else (an error state seen while it waits, an answer that it cannot read) as its base class without a status.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

from daytona import DaytonaConnectionError, DaytonaError, DaytonaTimeoutError

from services.sandbox.providers.daytona_values import Rejected, StateClash, VolumeMissing
from services.sandbox.providers.port import (
    InstanceNotFound,
    NameTaken,
    ProviderError,
    ProviderRefused,
    ProviderUnavailable,
)

_TEXT_LENGTH = 300
_LONGEST_RETRY_AFTER = 60.0
_QUOTA_WORDS = ("quota", "limit exceeded", "exceeds", "suspended", "maximum", "insufficient")
_TOO_MANY = 429
_NOT_NOW = frozenset({408, 425, _TOO_MANY, 500, 502, 503, 504})


class Subject(enum.Enum):
    """What a call is about; the same status means different things."""

    CREATE = "create"
    SANDBOX = "sandbox"
    # A call that changes the state of one.
    CHANGE = "change"
    VOLUME = "volume"
    ACCOUNT = "account"
    # A call into a sandbox: its 404 says nothing about whether the sandbox is there.
    INSIDE = "inside"


def translate(
    error: DaytonaError, doing: str, subject: Subject, clean: Callable[[str], str], now: datetime
) -> ProviderError:
    """The error of the port for one of the SDK. `clean` takes secrets out of a text; `doing` begins the message."""
    status = error.status_code
    text = f"{doing}: {_words(error, clean)}"
    if isinstance(error, DaytonaConnectionError | DaytonaTimeoutError) and status is None:
        return ProviderUnavailable(text)
    if status is None:
        return ProviderError(text)
    text = f"{doing}: {status}: {_words(error, clean)}"
    if status in _NOT_NOW or status >= 500:
        throttled = status == _TOO_MANY
        return ProviderUnavailable(
            text, retry_after=_retry_after(error.headers, now, throttled=throttled), throttled=throttled
        )
    if status == 401:
        return ProviderError(f"{doing}: 401: Daytona does not accept the API key")
    if status == 404:
        return _not_found(error, subject, text)
    return _refused(error, status, subject, text)


def _not_found(error: DaytonaError, subject: Subject, text: str) -> ProviderError:
    if subject is Subject.CREATE:
        return ProviderRefused(text, field="snapshot")
    if subject in (Subject.INSIDE, Subject.ACCOUNT):
        return ProviderUnavailable(text)
    if not _is_of_the_api(error):
        # A wrong URL or a proxy in between answers 404 too; taken for the truth, every sandbox would be gone.
        return ProviderUnavailable(f"{text} (this 404 does not come from the sandboxes of the API)")
    return VolumeMissing(text) if subject is Subject.VOLUME else InstanceNotFound(text)


def _refused(error: DaytonaError, status: int, subject: Subject, text: str) -> ProviderError:
    if subject is Subject.CREATE:
        if status == 409:
            return NameTaken(text)
        return ProviderRefused(text, field=_field(error.message.lower()))
    if status == 409:
        return StateClash(text)
    if subject in (Subject.CHANGE, Subject.VOLUME) and status in (400, 403, 422):
        return Rejected(text)
    return ProviderError(text)


def _field(words: str) -> str:
    """Which part of the spec a refused create is about, as far as its text tells."""
    if any(word in words for word in _QUOTA_WORDS):
        return "resources"
    return next((field for field in ("snapshot", "image", "target") if field in words), "")


def _words(error: DaytonaError, clean: Callable[[str], str]) -> str:
    """The message in one line of bounded length."""
    text = " ".join(clean(error.message).split()) or type(error).__name__
    return text if len(text) <= _TEXT_LENGTH else f"{text[:_TEXT_LENGTH]}…"


def _is_of_the_api(error: BaseException) -> bool:
    """Whether the body is one that a controller of the API writes, and not its router or somebody before it."""
    cause: BaseException | None = error
    while cause is not None:
        body = getattr(cause, "body", None)
        if isinstance(body, bytes):
            body = body.decode("utf-8", "replace")
        if isinstance(body, str):
            try:
                content: object = json.loads(body)
            except ValueError:
                return False
            message = content.get("message") if isinstance(content, dict) else None
            return isinstance(message, str) and not message.startswith("Cannot ")
        cause = cause.__cause__
    return False


def _retry_after(headers: Mapping[str, object], now: datetime, *, throttled: bool) -> float | None:
    """Seconds, from Retry-After as a number or a date, else from the reset of the rate limit that was met; bounded."""
    found = {name.lower(): str(value) for name, value in headers.items()}
    texts = [found[name] for name in found if name == "retry-after" or name.startswith("retry-after-")]
    if throttled:
        # Every other answer has it too, and there it says nothing about that answer.
        texts += [value for name, value in found.items() if name.startswith("x-ratelimit-reset")]
    for text in texts:
        seconds = _seconds(text, now)
        if seconds is not None:
            return min(max(seconds, 0.0), _LONGEST_RETRY_AFTER)
    return None


def _seconds(text: str, now: datetime) -> float | None:
    try:
        return float(text)
    except ValueError:
        pass
    try:
        moment = parsedate_to_datetime(text)
    except ValueError:
        return None
    return ((moment if moment.tzinfo else moment.replace(tzinfo=UTC)) - now).total_seconds()
