"""The span of a message that the `hearth` program sends: the root of its turn's trace, in the store of the stack."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from opentelemetry.trace import SpanKind, Tracer

# Beside those of the services, and named like theirs.
_FILE = "cli.jsonl"
_SERVICE = "hearth-cli"
_FILE_BYTES = 4 * 1024 * 1024


@contextmanager
def sending(root: Path, command: str) -> Iterator[None]:
    """A span around the block, which sends one message for `command`. Where there is no store of a stack there is none,
    as for services elsewhere."""
    directory = root / "traces"
    if not directory.is_dir():
        yield
        return
    with _tracer(directory).start_as_current_span(f"hearth {command}", kind=SpanKind.INTERNAL):
        yield


@functools.cache
def _tracer(directory: Path) -> Tracer:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor

    from services.chassis.span_file import SpanFile
    from services.chassis.span_words import Wordless

    provider = TracerProvider(resource=Resource.create({"service.name": _SERVICE}), shutdown_on_exit=False)
    # Each span is written when it ends: a command may be over right after.
    provider.add_span_processor(SimpleSpanProcessor(Wordless(SpanFile(directory / _FILE, max_bytes=_FILE_BYTES))))
    return provider.get_tracer("hearth")
