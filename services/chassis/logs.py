"""Logs on stderr: one JSON object a line, or plain text for a person at a terminal, both with the current trace."""

from __future__ import annotations

import logging
import sys
from typing import Literal

from opentelemetry import trace
from pythonjsonlogger.json import JsonFormatter

# What a LogRecord has without any `extra`; the rest of its attributes are the fields that the caller gave.
_PLAIN = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime", "taskName"}
_CONTEXT_FIELDS = ("trace_id", "span_id", "service")


class _Context(logging.Filter):
    """Puts the service and the current trace on each record."""

    def __init__(self, service: str) -> None:
        super().__init__()
        self._service = service

    def filter(self, record: logging.LogRecord) -> bool:
        record.service = self._service
        span = trace.get_current_span().get_span_context()
        if span.is_valid:
            record.trace_id = format(span.trace_id, "032x")
            record.span_id = format(span.span_id, "016x")
        return True


# All that these tell of is the headers of a call.
_OF_HEADERS = ("opentelemetry.baggage.propagation", "opentelemetry.trace.span", "opentelemetry.trace.propagation")


class _Strangers(logging.Filter):
    """Drops what libraries log of requests that they refuse before any code of ours: anybody makes as many of them as
    he likes, each has a stack, and shows what was sent, which may be a token with a wrong character in it."""

    def filter(self, record: logging.LogRecord) -> bool:
        if record.name == "grpc._cython.cygrpc":
            return not str(record.msg).startswith("Invalid encoding")
        if record.name == "aiohttp.server" and record.exc_info and record.exc_info[0] is not None:
            return record.exc_info[0].__module__ != "aiohttp.http_exceptions"
        return record.levelno > logging.WARNING or not record.name.startswith(_OF_HEADERS)


class _Text(logging.Formatter):
    """`12:00:01.123 INFO history.committer event words  key=value`, then the stack if there is one."""

    default_msec_format = "%s.%03d"
    default_time_format = "%H:%M:%S"

    def format(self, record: logging.LogRecord) -> str:
        fields = " ".join(
            f"{key}={value}"
            for key, value in vars(record).items()
            if key not in _PLAIN and key not in _CONTEXT_FIELDS and not key.startswith("_")
        )
        name = record.name.removeprefix("services.")
        line = f"{self.formatTime(record)} {record.levelname} {name} {record.getMessage()}"
        if fields:
            line += f"  {fields}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


def setup_logging(service: str, *, level: str, form: Literal["auto", "json", "text"]) -> None:
    """Send every record of the process to stderr in one form; replaces handlers that were set before."""
    text = form == "text" or (form == "auto" and sys.stderr.isatty())
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        _Text()
        if text
        else JsonFormatter(
            ["levelname", "name", "message"],
            rename_fields={"levelname": "level", "name": "logger", "exc_info": "stack"},
            timestamp="time",
        )
    )
    handler.addFilter(_Context(service))
    handler.addFilter(_Strangers())
    logging.basicConfig(level=level, handlers=[handler], force=True)
    # While Postgres is away its pool logs a stack every second; health says it once.
    logging.getLogger("asyncpg.pool").setLevel(logging.ERROR)
    # Their INFO lines tell of each connection and migration context, which says nothing about a session.
    for name in ("alembic", "sqlalchemy", "asyncio", "aiohttp", "grpc", "opentelemetry"):
        logging.getLogger(name).setLevel(max(logging.WARNING, logging.getLevelName(level)))
