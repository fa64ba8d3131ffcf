"""A short fuzz run: no RPC answers as if nobody had thought of the case, nobody dies, nothing is held afterwards."""

from __future__ import annotations

import random
from pathlib import Path

import grpc
import pytest

from hearth.session.v1 import session_service_pb2
from services.chassis.auth import ANY_PROJECT
from tests.fuzz.callers import CALLERS, OTHER_PROJECT, Caller
from tests.fuzz.calls import Answer
from tests.fuzz.gauges import floors, slope
from tests.fuzz.messages import PROJECT, SESSIONS
from tests.fuzz.session import fuzz
from tests.fuzz.verdicts import problem
from tests.support.rpcs import RPCS

SEED = 20
OK = grpc.StatusCode.OK


async def test_hostile_messages_are_refused(scratch: Path) -> None:
    found = await fuzz(scratch / ".hearth", seed=SEED, seconds=8.0, workers=2)
    assert not found.problems, "\n".join(found.problems)
    assert {path for path, _ in found.answers} >= {rpc.path for rpc in RPCS}
    assert {code for _, code in found.answers} >= {"OK", "INVALID_ARGUMENT", "UNAUTHENTICATED", "PERMISSION_DENIED"}
    assert found.attacks["agentd"]
    assert len(found.attacks) > 5


def test_slope_is_that_of_the_last_part() -> None:
    flat_then_steep = [(float(at), 10.0 if at < 60 else 10.0 + (at - 60) / 60) for at in range(121)]
    assert abs(slope(flat_then_steep, 60) - 1.0) < 1e-6
    assert slope([(0.0, 5.0)], 60) == 0.0


@pytest.mark.parametrize("kept", [0.0, 1.5])
def test_what_is_kept_is_told_from_what_is_filled_for_a_moment(kept: float) -> None:
    dice = random.Random(1)
    points = [(at, 100 + kept * at / 60 + max(0.0, dice.gauss(0, 10)) * (at > 200)) for at in range(301)]
    assert abs(slope(floors(points), 300) - kept) < 0.2
    assert slope(points, 300) > kept + 0.5


def caller(project: str) -> Caller:
    """The first of that project."""
    return next(caller for caller in CALLERS if caller.project == project)


READER = next(caller for caller in CALLERS if caller.scopes == ("read",))


@pytest.mark.parametrize(
    ("name", "who", "answer", "wrong"),
    [
        ("GetSession", caller(ANY_PROJECT), Answer(OK, "", ""), None),
        ("GetSession", caller(PROJECT), Answer(OK, "", ""), None),
        ("GetSession", caller(OTHER_PROJECT), Answer(OK, "", ""), "reaches"),
        ("Subscribe", caller(OTHER_PROJECT), Answer(grpc.StatusCode.DEADLINE_EXCEEDED, "", "", 1), "reaches"),
        ("Subscribe", caller(PROJECT), Answer(grpc.StatusCode.CANCELLED, "", "", 1, given_up=True), None),
        ("SendInput", READER, Answer(OK, "", ""), "without the scope"),
        ("GetSession", caller(""), Answer(OK, "", ""), "without the scope"),
        ("GetSession", caller(PROJECT), Answer(grpc.StatusCode.UNKNOWN, "", "X"), "nobody thought of"),
        ("GetSession", caller(PROJECT), Answer(grpc.StatusCode.NOT_FOUND, "", ""), "no reason"),
        ("GetSession", caller(PROJECT), Answer(grpc.StatusCode.NOT_FOUND, "", "SESSION_NOT_FOUND"), None),
        ("GetSession", caller(PROJECT), Answer(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", ""), None),
        ("GetSession", caller(PROJECT), Answer(grpc.StatusCode.UNAVAILABLE, "Socket closed", ""), "no reason"),
    ],
)
def test_what_may_not_be_answered_is_seen(name: str, who: Caller, answer: Answer, wrong: str | None) -> None:
    rpc = next(rpc for rpc in RPCS if rpc.name == name)
    request = session_service_pb2.GetSessionRequest()
    request.session.project, request.session.session = PROJECT, SESSIONS[0]
    found = problem(rpc, who, [request.SerializeToString()], answer)
    assert found == wrong if wrong is None else wrong in (found or "")
