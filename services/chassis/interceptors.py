"""What surrounds every RPC of a server, from the outside in: its span, the mapping of its errors, the caller's rights.

Each interceptor sees a handler as one coroutine function (`as_run`), whichever of the four kinds it is and whether it
yields or writes its responses. A stream's generator is closed when the stream ends, however that happens; gRPC itself
leaves that to the garbage collector.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeAlias, cast

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_status import rpc_status
from opentelemetry import context as telemetry_context
from opentelemetry import propagate, trace
from opentelemetry.trace import SpanKind

from services.chassis import deadlines
from services.chassis.errors import HearthError, Unavailable, as_hearth_error, internal, invalid
from services.chassis.metrics import BROKEN, CALLS, Count, Sizes
from services.chassis.scopes import is_open
from services.chassis.spans import CallSpan

logger = logging.getLogger(__name__)

# Quoted: these classes are generic for the type checker only.
Context: TypeAlias = "grpc.aio.ServicerContext[Any, Any]"
Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Continuation: TypeAlias = "Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]]"
# A handler of any kind: the request (or the iterator of requests) and the context in, the response (None after a stream
# of responses, which it has written) out.
Run: TypeAlias = "Callable[[Any, Context], Awaitable[Any]]"
# What a caller cannot help.
_DEFECTS = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN, grpc.StatusCode.DATA_LOSS)
# Of a message to what needs no token, which is kept as long as its stream: it names a service, a symbol or a file.
_OPEN_BYTES = 1024


@dataclasses.dataclass(frozen=True, slots=True)
class _Refused:
    """Stands for a request that was not read, until the handler's place in the chain is reached."""

    # One, which goes when it is raised: what its traceback reaches must not hold it.
    errors: list[HearthError]


def as_run(handler: Handler) -> Run:
    """The behaviour of a handler of any kind, as one coroutine function."""
    behavior = cast(
        "Callable[[Any, Context], Any]",
        handler.unary_unary or handler.unary_stream or handler.stream_unary or handler.stream_stream,
    )
    if inspect.iscoroutinefunction(behavior):
        return behavior

    async def run(request: Any, context: Context) -> Any:
        result = behavior(request, context)
        if inspect.isawaitable(result):
            return await result
        responses = cast("AsyncIterator[Any]", result)
        try:
            async for response in responses:
                await context.write(response)
        finally:
            close = getattr(responses, "aclose", None)
            if close is not None:
                await close()
        return None

    return run


def as_handler(handler: Handler, run: Run, *, parse: Callable[[bytes], Any] | None = None) -> Handler:
    """A handler like `handler` that behaves as `run`; `parse` replaces its deserializer."""
    if handler.request_streaming:
        make = (
            grpc.stream_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.stream_unary_rpc_method_handler
        )
    else:
        make = (
            grpc.unary_stream_rpc_method_handler if handler.response_streaming else grpc.unary_unary_rpc_method_handler
        )
    return make(cast("Any", run), parse or handler.request_deserializer, handler.response_serializer)


class Wrapped:
    """What an interceptor made of the handlers of a server: made once for each, and not again for each call."""

    def __init__(self) -> None:
        self._made: dict[str, tuple[Handler, Handler]] = {}

    def of(self, method: str, handler: Handler, wrap: Callable[[str, Handler], Handler]) -> Handler:
        """`wrap(method, handler)`; a handler that was made for one call, as a refusal is, is wrapped for that call."""
        known = self._made.get(method)
        if known is None or known[0] is not handler:
            known = self._made[method] = (handler, wrap(method, handler))
        return known[1]


class TelemetryInterceptor(grpc.aio.ServerInterceptor):
    """One SERVER span for each call, continuing the caller's trace, and the time that it took, unless it is a stream.
    Health checks and reflection have neither.

    OpenTelemetry's own interceptor is not used: it cannot serve a handler that writes its responses, holds a stream's
    span open until the stream ends, and puts the texts of exceptions on its spans.
    """

    def __init__(self) -> None:
        self._wrapped = Wrapped()
        self._calls = Sizes(CALLS)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or is_open(handler_call_details.method):
            return handler
        return self._wrapped.of(handler_call_details.method, handler, self._traced)

    def _traced(self, method: str, handler: Handler) -> Handler:
        run = as_run(handler)
        stream = handler.response_streaming
        name = method.lstrip("/")

        async def traced(request: Any, context: Context) -> Any:
            call = CallSpan(method, SpanKind.SERVER, stream=stream, parent=_parent(context))
            # What lies on this stack is kept for hours, for each of thousands of readers: `use_span` keeps more of it.
            token = telemetry_context.attach(trace.set_span_in_context(call.span))
            cancelled = False
            began = time.perf_counter()
            try:
                return await run(request, context)
            except asyncio.CancelledError:
                cancelled = True
                raise
            finally:
                telemetry_context.detach(token)
                code = grpc.StatusCode.CANCELLED if cancelled else _code_of(context)
                call.finish(code)
                if not stream:
                    self._calls.record(time.perf_counter() - began, name, code.name)

        return as_handler(handler, traced)


_CODES = {code.value[0]: code for code in grpc.StatusCode}


def _code_of(context: Context) -> grpc.StatusCode:
    """What a call was answered with. gRPC holds a number, which is 0 as well where nothing was said."""
    code: object = context.code()
    if isinstance(code, grpc.StatusCode):
        return code
    return _CODES.get(code, grpc.StatusCode.UNKNOWN) if isinstance(code, int) else grpc.StatusCode.OK


def _parent(context: Context) -> telemetry_context.Context:
    """The caller's trace."""
    return propagate.extract(
        {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
    )


class Counter:
    """Counts the blocks that run `with` it; `idle` is set while there is none."""

    def __init__(self) -> None:
        self._count = 0
        self.idle = asyncio.Event()
        self.idle.set()

    def __enter__(self) -> None:
        self._count += 1
        self.idle.clear()

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        if not self._count:
            self.idle.set()


class Endable:
    """Calls that are being answered now, so that they can be ended from outside with a status that says why."""

    def __init__(self) -> None:
        self._ending: dict[asyncio.Task[Any], HearthError | None] = {}

    def __len__(self) -> int:
        return len(self._ending)

    def end(self, task: asyncio.Task[Any], error: HearthError) -> None:
        """Cancel the handler that runs in `task`; its caller gets `error`. Nothing happens when it has ended."""
        if self._ending.get(task, error) is None:
            self._ending[task] = error
            task.cancel()

    def __enter__(self) -> None:
        """The running task answers one."""
        self._ending[_running_task()] = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """It does so no more; a cancellation by `end` is raised as the error given there."""
        task = _running_task()
        told = self._ending.pop(task)
        if told is not None and isinstance(error, asyncio.CancelledError):
            task.uncancel()
            raise told from None


class Uploads(Endable):
    """Streams of requests with one response, which may come while the process shuts down."""

    def __init__(self, single: Counter) -> None:
        super().__init__()
        self._single = single

    def __enter__(self) -> None:
        super().__enter__()
        self._single.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._single.__exit__()
        super().__exit__(kind, error, trace)


class Streams(Endable):
    """The streams of responses, and the other calls beside them."""

    def __init__(self) -> None:
        super().__init__()
        self._closed: HearthError | None = None
        # Calls with one response that are being answered now.
        self.single = Counter()
        self.uploads = Uploads(self.single)

    def end(self, task: asyncio.Task[Any], error: HearthError) -> None:
        super().end(task, error)
        self.uploads.end(task, error)

    def close(self, error: HearthError) -> None:
        """End every stream of responses with `error`, and each one that has not reached its handler yet."""
        self._closed = error
        for task in list(self._ending):
            self.end(task, error)

    def __enter__(self) -> None:
        super().__enter__()
        if self._closed is not None:
            self.end(_running_task(), self._closed)


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Maps whatever a handler raises to one status, before the first response or after the thousandth.

    Also notes the deadline of the call (see `deadlines`), answers a request that does not parse, and counts what ends
    by a defect.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._wrapped = Wrapped()
        self._broken = Count(BROKEN)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        return handler and self._wrapped.of(handler_call_details.method, handler, self._mapped)

    def _mapped(self, method: str, handler: Handler) -> Handler:
        run = as_run(handler)
        # Health watchers and reflection hold no state that an early end would save; they go when the server stops.
        guard: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if not is_open(method):
            if handler.response_streaming:
                guard = self._streams
            else:
                guard = self._streams.uploads if handler.request_streaming else self._streams.single

        async def mapped(request: Any, context: Context) -> Any:
            deadlines.serve_until(context.time_remaining())
            try:
                if isinstance(request, _Refused):
                    raise request.errors.pop()
                with guard:
                    return await run(request, context)
            except grpc.aio.AbortError:
                raise
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if task is not None and task.cancelling():
                    raise
                # Not the call was cancelled but something it waited for: that happens when the process shuts down.
                await abort(context, shutting_down())
            except Exception as error:
                if _caller_is_gone(error):
                    # There is nobody to answer, and gRPC is about to cancel this call.
                    raise asyncio.CancelledError from error
                await abort(context, self._counted(_seen_by_caller(error, method), method))

        return as_handler(handler, mapped, parse=_tolerant(handler, _OPEN_BYTES if is_open(method) else None))

    def _counted(self, seen: HearthError, method: str) -> HearthError:
        if seen.code in _DEFECTS:
            self._broken.add(1, method.lstrip("/"))
        return seen


def _running_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None
    return task


def shutting_down() -> Unavailable:
    """The answer to a call that this process gives up because it ends."""
    return Unavailable("this process is shutting down; connect again", reason="SHUTTING_DOWN", retry_after=0.1)


def _caller_is_gone(error: Exception) -> bool:
    """Whether a read or write failed because the call ended under it; gRPC exports no name for that error."""
    kind = type(error)
    return kind.__name__ == "ExecuteBatchError" and kind.__module__.startswith("grpc.")


def _unreadable() -> HearthError:
    return invalid("request", "is not a message of the type that this RPC takes")


def _too_long(most: int) -> HearthError:
    return invalid("request", f"may have {most} bytes, this RPC needs no token", reason="TOO_LARGE")


def _seen_by_caller(error: Exception, method: str) -> HearthError:
    seen = as_hearth_error(error)
    if seen is None:
        logger.error("call failed by a defect", exc_info=error, extra={"method": method})
        return internal()
    if seen is not error and seen.code is grpc.StatusCode.UNAVAILABLE:
        logger.warning(
            "call failed, a dependency is away",
            extra={"method": method, "cause": type(error).__name__, **seen.metadata},
        )
    return seen


async def abort(context: Context, error: HearthError) -> None:
    """End the call with `error` as its status; raises, as `context.abort` does."""
    current = trace.get_current_span()
    if current.is_recording():
        current.set_attribute("hearth.reason", error.reason)
    status = rpc_status.to_status(error.to_status())
    try:
        await context.abort(status.code, status.details, status.trailing_metadata)
    except grpc.aio.AbortError as aborted:
        _running_task().add_done_callback(functools.partial(_forget_frames, aborted))
        raise
    except Exception as failure:
        if _caller_is_gone(failure):
            # gRPC would log it as an error of this service.
            raise asyncio.CancelledError from failure
        raise


def _forget_frames(aborted: grpc.aio.AbortError, _task: object) -> None:
    """Have the end of a call keep nothing of it.

    gRPC keeps the error in the context of the call, which the frames of the error's traceback keep: a circle that would
    hold each refused request until a collection of everything.
    """
    aborted.__traceback__ = aborted.__context__ = None


def _tolerant(handler: Handler, most: int | None) -> Callable[[bytes], Any] | None:
    """The handler's deserializer, but a broken message becomes an error of ours: gRPC would answer UNKNOWN. One of more
    than `most` bytes is not read.

    A single request is parsed before the handler starts, so the error has to wait in its place; a streamed one is
    parsed when the handler asks for it, and the error can be raised right there.
    """
    parse = handler.request_deserializer
    if parse is None:
        return None
    streamed = handler.request_streaming

    def tolerant(data: bytes) -> Any:
        try:
            if most is not None and len(data) > most:
                raise _too_long(most)
            return parse(data)
        except DecodeError:
            if streamed:
                raise _unreadable() from None
            return _Refused([_unreadable()])
        except HearthError as error:
            if streamed:
                raise
            return _Refused([error.with_traceback(None)])

    return tolerant
