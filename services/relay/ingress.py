"""Takes frames from producers: one call of a script on Valkey checks, keeps and publishes all batches of a request.

Everything that decides is in the script and in Valkey, so any replica may take any producer at any time. A session of
which Valkey knows nothing (its first turn, or everything was flushed) is first seeded with what history says about it,
so that a superseded producer cannot come first.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from redis.exceptions import NoScriptError, RedisError

from hearth.history.v1 import history_pb2
from hearth.relay.v1 import relay_pb2, relay_service_pb2
from hearth.types.v1 import session_pb2
from services.chassis.errors import HearthError
from services.relay.batches import Prepared, check, check_frames, prepare
from services.relay.buffer import channel, frames_key, state_key
from services.relay.log import Log
from services.relay.settings import RelaySettings
from services.relay.spans import publishing

if TYPE_CHECKING:
    from redis.asyncio import Redis

logger = logging.getLogger(__name__)

# Frames outlive the longest turn by this much, for the reader that comes late and the writer that ends late.
_KEPT_LONGER_SECONDS = 3600.0
_KEPT_AFTER_END_MILLISECONDS = 60_000

_ID_CHARACTERS = 36

# What is prepared and taken in one go; Valkey and this process do nothing else meanwhile.
_PART_FRAMES = 1000

_ACCEPTED, _FENCED, _CONFLICT, _NEEDS_HEAD, _FAILED = 1, 2, 3, 4, 5
_UNKNOWN = ("0", "", 0, "0")


class _Verdict(NamedTuple):
    """What the script says about one batch."""

    kind: int
    next_index: int
    execution: str
    epoch: int
    at_fault: int


class Ingress:
    """The way of frames into the bus. `start` it once."""

    def __init__(self, client: Redis, log: Log, settings: RelaySettings) -> None:
        self._client = client
        self._log = log
        live = round((settings.relay_turn_limit + _KEPT_LONGER_SECONDS) * 1000)
        self._limits = (settings.relay_buffer_frames, settings.relay_buffer_bytes, live, _KEPT_AFTER_END_MILLISECONDS)
        self._script = importlib.resources.files(__package__).joinpath("ingress.lua").read_text("utf-8")
        self._sha = ""

    async def start(self) -> None:
        """Load the script. Raises `RedisError`."""
        self._sha = await self._client.script_load(self._script)

    async def publish(self, request: relay_service_pb2.PublishRequest) -> relay_service_pb2.PublishResponse:
        """Take the batches of one request, in order; one result for each. Raises nothing that concerns one batch."""
        with publishing(request.batches):
            return await self._publish(request)

    async def _publish(self, request: relay_service_pb2.PublishRequest) -> relay_service_pb2.PublishResponse:
        results = [
            await self._check(batch, position) if len(batch.frames) > _PART_FRAMES else _checked(batch, position)
            for position, batch in enumerate(request.batches)
        ]
        for parts in _rounds(request.batches, results):
            # Of a long batch the next part goes only if the one before it was taken.
            fine = [part for part in parts if _goes_on(results[part.position])]
            prepared = [
                prepare(request.batches[part.position], _path(part.position), part.start, part.stop) for part in fine
            ]
            verdicts = await self._take(prepared) if prepared else []
            for part, batch, verdict in zip(fine, prepared, verdicts, strict=True):
                results[part.position] = _result(batch, verdict)
        return relay_service_pb2.PublishResponse(number=request.number, results=[found for found in results if found])

    async def _check(self, batch: relay_pb2.FrameBatch, position: int) -> relay_pb2.PublishResult | None:
        """As `_checked`, letting others run in between."""
        for start in range(0, len(batch.frames), _PART_FRAMES):
            if wrong := _checked(batch, position, start):
                return wrong
            await asyncio.sleep(0)
        return None

    async def _take(self, batches: Sequence[Prepared]) -> list[_Verdict | None]:
        """What became of each batch; None when it could not be asked for."""
        verdicts = await self._run(batches, {})
        unseeded = [position for position, verdict in enumerate(verdicts) if verdict and verdict.kind == _NEEDS_HEAD]
        if unseeded:
            again = [batches[position] for position in unseeded]
            for position, verdict in zip(unseeded, await self._seed_and_run(again), strict=True):
                verdicts[position] = verdict
        return verdicts

    async def _seed_and_run(self, batches: Sequence[Prepared]) -> list[_Verdict | None]:
        keys = list(dict.fromkeys(batch.key for batch in batches))
        try:
            heads = dict(zip(keys, await self._log.heads(keys), strict=True))
        except HearthError as error:
            # Whether these producers are superseded is not known, so their frames stay out.
            logger.warning("sessions cannot be seeded", extra={"sessions": len(keys), "cause": error.reason})
            return [None] * len(batches)
        return await self._run(batches, heads)

    async def _run(
        self, batches: Sequence[Prepared], heads: dict[tuple[str, str], history_pb2.Head]
    ) -> list[_Verdict | None]:
        keys: list[bytes] = []
        arguments: list[Any] = [*self._limits]
        for batch in batches:
            key = batch.key
            keys += (state_key(key), frames_key(key))
            head = heads.get(key) if heads else None
            arguments += (
                *(channel(key), batch.execution_id, batch.epoch, "1" if batch.ended else "0", batch.head),
                *(_UNKNOWN if head is None else _head(head)),
                len(batch.entries),
            )
            for entry in batch.entries:
                arguments += entry
        try:
            answers = await self._evaluate(keys, arguments)
        except RedisError as error:
            logger.warning("frames not taken, the bus is away", extra={"cause": type(error).__name__})
            return [None] * len(batches)
        return [_verdict(answer) for answer in answers]

    async def _evaluate(self, keys: list[bytes], arguments: list[Any]) -> list[list[Any]]:
        try:
            answers: list[list[Any]] = await self._client.evalsha(self._sha, len(keys), *keys, *arguments)
        except NoScriptError:
            # A restarted server has forgotten it; nothing of this call was run.
            await self.start()
            answers = await self._client.evalsha(self._sha, len(keys), *keys, *arguments)
        return answers


def _checked(batch: relay_pb2.FrameBatch, position: int, start: int = 0) -> relay_pb2.PublishResult | None:
    """The result of a batch that is wrong in its head or its next frames from `start` on, else None."""
    path = _path(position)
    problems = check(batch, path) + check_frames(batch, path, start, start + _PART_FRAMES)
    if not problems:
        return None
    # What is no id may have any length.
    execution = session_pb2.ExecutionRef(execution_id=batch.execution_id[:_ID_CHARACTERS], epoch=batch.epoch)
    return relay_pb2.PublishResult(outcome=relay_pb2.PUBLISH_OUTCOME_INVALID, execution=execution, problems=problems)


class _Part(NamedTuple):
    """Frames of one batch that are taken in one call."""

    position: int
    start: int
    stop: int


def _rounds(
    batches: Sequence[relay_pb2.FrameBatch], results: Sequence[relay_pb2.PublishResult | None]
) -> Iterator[list[_Part]]:
    """The parts of all batches that have no result yet, in order, a bounded number of frames in each round."""
    parts: list[_Part] = []
    frames = 0
    for position, batch in enumerate(batches):
        if results[position] is not None:
            continue
        for start in range(0, max(1, len(batch.frames)), _PART_FRAMES):
            stop = min(start + _PART_FRAMES, len(batch.frames))
            if parts and (start or frames + stop - start > _PART_FRAMES):
                yield parts
                parts, frames = [], 0
            parts.append(_Part(position, start, stop))
            frames += stop - start
    if parts:
        yield parts


def _goes_on(result: relay_pb2.PublishResult | None) -> bool:
    return result is None or result.outcome == relay_pb2.PUBLISH_OUTCOME_ACCEPTED


def _path(position: int) -> str:
    return f"batches[{position}]"


def _head(head: history_pb2.Head) -> tuple[str, str, int, str]:
    return "1", head.execution_id, head.epoch, "1" if head.ended or not head.execution_id else "0"


def _verdict(answer: list[Any]) -> _Verdict | None:
    kind, next_index, execution, epoch, at_fault, *cause = answer
    if kind == _FAILED:
        logger.error("frames not taken, the ingress script failed", extra={"cause": cause[0].decode() if cause else ""})
        return None
    return _Verdict(kind, next_index, execution.decode(), int(epoch), at_fault)


def _result(batch: Prepared, verdict: _Verdict | None) -> relay_pb2.PublishResult:
    result = relay_pb2.PublishResult()
    result.execution.execution_id, result.execution.epoch = batch.execution_id, batch.epoch
    if verdict is None or verdict.kind == _NEEDS_HEAD:
        result.outcome = relay_pb2.PUBLISH_OUTCOME_UNAVAILABLE
        return result
    if verdict.kind == _FENCED:
        result.outcome = relay_pb2.PUBLISH_OUTCOME_FENCED
        result.current.execution_id, result.current.epoch = verdict.execution, verdict.epoch
        return result
    if verdict.next_index:
        result.through = verdict.next_index - 1
    if verdict.kind == _CONFLICT:
        result.outcome = relay_pb2.PUBLISH_OUTCOME_CONFLICT
        result.problems.add(
            field=f"frames[frame_index={verdict.at_fault}]", description="was taken before with other content"
        )
    elif batch.too_large is not None:
        result.outcome = relay_pb2.PUBLISH_OUTCOME_TOO_LARGE
        result.problems.append(batch.too_large)
    else:
        result.outcome = relay_pb2.PUBLISH_OUTCOME_ACCEPTED
    return result
