"""Tells history that output of a run is missing for good, where no ending of that run's writer can say it."""

from __future__ import annotations

import asyncio
import logging
import random

import grpc
import grpc.aio

from hearth._pipeline import FIRST_BACKOFF_SECONDS, MAX_BACKOFF_SECONDS
from hearth.history.v1 import history_service_pb2, history_service_pb2_grpc
from hearth.types.v1 import session_pb2

logger = logging.getLogger(__name__)

_ANSWER_SECONDS = 10.0
_REASON_CHARACTERS = 255

# Worth another try; any other code is the answer.
_AWAY = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        # The server ended before it answered.
        grpc.StatusCode.CANCELLED,
    }
)


class Marker:
    """Marks executions, each until history has answered or this is closed."""

    def __init__(self, history: grpc.aio.Channel) -> None:
        self._stub = history_service_pb2_grpc.HistoryServiceStub(history)
        self._tasks: set[asyncio.Task[None]] = set()

    def mark(self, key: tuple[str, str], execution_id: str, reason: str) -> None:
        """Begin to mark one; nobody waits for it."""
        request = history_service_pb2.MarkIncompleteRequest(
            session=session_pb2.SessionKey(project=key[0], session=key[1]),
            execution_id=execution_id,
            reason=reason[:_REASON_CHARACTERS],
        )
        task = asyncio.create_task(self._mark(request), name="producer mark")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self, timeout: float) -> None:
        """Let what was begun end within `timeout` seconds."""
        if self._tasks:
            _, late = await asyncio.wait(self._tasks, timeout=timeout)
            for task in late:
                task.cancel()
            if late:
                await asyncio.wait(late)

    async def _mark(self, request: history_service_pb2.MarkIncompleteRequest) -> None:
        about = {"session": request.session.session, "execution": request.execution_id, "cause": request.reason}
        delay = FIRST_BACKOFF_SECONDS
        while True:
            try:
                await self._stub.MarkIncomplete(request, timeout=_ANSWER_SECONDS)
            except grpc.aio.AioRpcError as error:
                if error.code() not in _AWAY:
                    logger.error("execution not marked incomplete", extra={**about, "code": error.code().name})
                    return
            except Exception:
                # A channel that was closed under us says so by an exception that gRPC does not export.
                logger.exception("execution not marked incomplete", extra=about)
                return
            else:
                logger.warning("execution marked incomplete", extra=about)
                return
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))  # noqa: S311 - spreads retries, nothing secret
            delay = min(2 * delay, MAX_BACKOFF_SECONDS)
