"""What a turn works with, and how a turn ends early."""

from __future__ import annotations

import dataclasses

from hearth.producer import Producer
from services.chassis.clock import Clock, Ids
from services.pool.control.interactions import Interactions
from services.pool.control.outbox import Outbox
from services.pool.control.settlement import Settlement
from services.pool.credentials_store import Credentials
from services.pool.harness.port import HarnessClient
from services.pool.log import Log
from services.pool.metrics import Metrics
from services.pool.settings import PoolSettings
from services.pool.store import Store
from services.pool.trust import Trust
from services.pool.turns.parking import Parking
from services.pool.turns.recovery import Recovery
from services.pool.turns.sandboxes import Sandboxes
from services.pool.warm.entries import Entries


@dataclasses.dataclass(frozen=True, slots=True)
class TurnRoom:
    """The parts of the process that every turn shares."""

    store: Store
    outbox: Outbox
    settlement: Settlement
    sandboxes: Sandboxes
    credentials: Credentials
    entries: Entries
    harness: HarnessClient
    producer: Producer
    log: Log
    clock: Clock
    ids: Ids
    holder: str
    settings: PoolSettings
    metrics: Metrics
    recovery: Recovery
    trust: Trust
    interactions: Interactions
    parking: Parking


class TurnFailed(Exception):
    """The turn cannot go on. `code` is a name of `hearth.types.v1.Reason`; the message is for people."""

    def __init__(self, code: str, message: str, *, retryable: bool = True) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retryable = retryable


class Fenced(Exception):
    """The execution is not this replica's any more: drop what is held, and call nothing. `epoch` is the one seen."""

    def __init__(self, epoch: int = 0) -> None:
        super().__init__(f"fenced at epoch {epoch}")
        self.epoch = epoch


class Preempted(Exception):
    """Something else ends the execution, or gives it back, before the agent was asked."""
