"""A producer in a process of its own that writes more than its memory may hold, for tests that end or starve it.

`python -m tests.support.spilling_producer --history A --directory D ...` prints one JSON line when everything is
written or refused (`parked`, `refused`, `taken`), and one when its ending is answered (`outcome`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import signal

from hearth.channel import open_channel
from hearth.history.v1 import history_pb2
from hearth.producer import Producer, ProducerLimits
from hearth.types.v1 import content_pb2, event_pb2, session_pb2
from services.chassis.clock import SystemClock


def message(number: int, size: int) -> event_pb2.Event:
    """A message that begins with its number."""
    part = content_pb2.ContentPart(text=content_pb2.TextPart(text=f"{number} " + "x" * size))
    body = event_pb2.MessageCompleted(
        message_id=f"m{number}", role=content_pb2.ROLE_AGENT, content=[part], finish_reason="end"
    )
    return event_pb2.Event(message_completed=body)


async def main() -> None:
    """Write, wait for the answers, end."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--history", required=True)
    parser.add_argument("--directory", required=True)
    parser.add_argument("--project", default="test")
    parser.add_argument("--session", required=True)
    parser.add_argument("--execution", required=True)
    parser.add_argument("--count", type=int, required=True)
    parser.add_argument("--size", type=int, default=10_000)
    parser.add_argument("--memory", type=int, default=1_000_000)
    parser.add_argument("--file-limit", type=int, default=0, help="RLIMIT_FSIZE in bytes; 0 leaves it")
    parser.add_argument(
        "--fork", type=int, default=0, help="1: leave a child that inherits what is open; tells its pid"
    )
    options = parser.parse_args()
    if options.file_limit:
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (options.file_limit, hard))
    async with open_channel(options.history) as channel:
        limits = ProducerLimits(waiting_bytes=options.memory, spill_dir=options.directory)
        producer = Producer(history=channel, relay=channel, clock=SystemClock(), limits=limits)
        await producer.start()
        session = session_pb2.SessionKey(project=options.project, session=options.session)
        writer = producer.writer(session, options.execution, 1)
        writer.event(event_pb2.Event(execution_started=event_pb2.ExecutionStarted(agent="test")))
        taken = 0
        while taken < options.count and not writer.refused.done():
            writer.event(message(taken, options.size))
            taken += not writer.refused.done()
            if taken % 10 == 0:
                await asyncio.sleep(0.001)
        said: dict[str, object] = {"taken": taken, "parked": writer.parked_bytes, "refused": ""}
        if writer.refused.done():
            said["refused"] = writer.refused.result().detail
        if options.fork:
            said["child"] = child = os.fork()
            if child == 0:
                signal.pause()
        print(json.dumps(said), flush=True)
        body = event_pb2.ExecutionFailed(code="HISTORY_UNAVAILABLE")
        result = await writer.ending(event_pb2.Event(execution_failed=body))
        print(json.dumps({"outcome": history_pb2.AppendOutcome.Name(result.outcome)}), flush=True)
        await producer.close(5.0)


if __name__ == "__main__":
    asyncio.run(main())
