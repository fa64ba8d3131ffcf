"""Reads logs back over gRPC, and says what is wrong with them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import grpc.aio

from benchmarks.writing import key
from hearth.history.v1 import history_service_pb2, history_service_pb2_grpc
from hearth.types.v1 import event_pb2


@dataclass(frozen=True, slots=True)
class Replayed:
    """One pass over a log. Times are seconds from the call; `digest` is empty unless it was asked for."""

    events: int
    seconds: float
    first_chunk: float
    ids: list[str]
    digest: str
    problems: list[str]


async def replay(channel: grpc.aio.Channel, session: str, *, thorough: bool = False) -> Replayed:
    """Read a log from its start, every event parsed, its id and place looked at.

    With `thorough` the whole content of each event but the first goes into the digest.
    """
    stub = history_service_pb2_grpc.HistoryServiceStub(channel)
    request = history_service_pb2.StreamEventsRequest(session=key(session))
    ids: list[str] = []
    problems: list[str] = []
    content = ContentDigest()
    expected = head = 0
    first_chunk = 0.0
    began = time.perf_counter()
    try:
        async for chunk in stub.StreamEvents(request):
            first_chunk = first_chunk or time.perf_counter() - began
            head = chunk.bounds.head
            for item in chunk.events:
                expected += 1
                event = item.event
                if item.cursor.sequence != expected:
                    problems.append(f"{session}: sequence {item.cursor.sequence} where {expected} is next")
                    expected = item.cursor.sequence
                ids.append(event.event_id)
                if thorough and expected > 1:
                    # The first one opened the execution; who wrote the rest knows nothing of its content.
                    content.add(event)
    except grpc.aio.AioRpcError as error:
        problems.append(f"{session}: {error.code().name} after {expected} events: {error.details()}")
    seconds = time.perf_counter() - began
    if expected != head:
        problems.append(f"{session}: the stream ends at {expected}, the head is {head}")
    return Replayed(len(ids), seconds, first_chunk, ids, content.text if thorough else "", problems)


async def check_logs(channel: grpc.aio.Channel, expected: Mapping[str, Mapping[int, str]]) -> list[str]:
    """What is wrong with logs that must hold exactly these events: session → sequence → event id."""
    problems: list[str] = []
    for session, events in expected.items():
        found = await replay(channel, session)
        problems += found.problems + compare(session, found.ids, events)
    return problems


def compare(session: str, found: Sequence[str], acknowledged: Mapping[int, str]) -> list[str]:
    """What is wrong with a log whose ids are `found`, in order from sequence 1. Pure."""
    problems = []
    if len(found) != len(acknowledged):
        problems.append(f"{session}: {len(found)} events stored, {len(acknowledged)} acknowledged")
    wrong = [place for place, id_ in enumerate(found, 1) if acknowledged.get(place) != id_]
    if wrong:
        problems.append(f"{session}: {len(wrong)} events are not the acknowledged ones, the first at {wrong[0]}")
    return problems


class ContentDigest:
    """Of events in order: two equal digests mean equal contents."""

    def __init__(self) -> None:
        self._hash = hashlib.sha256()

    def add(self, event: event_pb2.Event) -> None:
        """The next event."""
        self.add_serialized(event.SerializeToString(deterministic=True))

    def add_serialized(self, content: bytes) -> None:
        """The next event, serialized deterministically."""
        self._hash.update(len(content).to_bytes(4, "big") + content)

    @property
    def text(self) -> str:
        """The digest so far."""
        return self._hash.hexdigest()
