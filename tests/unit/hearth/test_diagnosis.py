"""What the doctor finds in the answers of the services, and what it leaves alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

import pytest

from hearth.cli.diagnosis import NO_ANSWER, NOT_SERVING, SERVING, Picture, Service, findings, loopback, notes
from hearth.pool.v1 import pool_pb2, pool_service_pb2
from hearth.sandbox.v1 import sandbox_pb2, sandbox_service_pb2
from hearth.types.v1 import session_pb2

NOW = datetime(2026, 11, 1, 12, tzinfo=UTC)
HOLDER = "11111111-1111-1111-1111-111111111111"
PARKED_ID = "22222222-2222-2222-2222-222222222222"


def sandbox(seconds: float = 60.0, **fields: object) -> sandbox_pb2.Sandbox:
    """A parked sandbox that changed so long ago, with some fields otherwise."""
    found = sandbox_pb2.Sandbox(
        sandbox_id=PARKED_ID,
        session=session_pb2.SessionKey(project="p", session="s"),
        provider="daytona",
        tenure=sandbox_pb2.TENURE_PARKED,
        observed=sandbox_pb2.SANDBOX_STATE_RUNNING,
        holder=HOLDER,
    )
    found.changed_at.FromDatetime(NOW - timedelta(seconds=seconds))
    for name, value in fields.items():
        setattr(found, name, value)
    return found


def picture() -> Picture:
    """A deployment in which all is good: one parked sandbox of the one replica."""
    usage = sandbox_service_pb2.GetUsageResponse(
        slots=[sandbox_pb2.SlotUsage(provider="daytona", cap=20, used=1, worst_micro_usd_per_hour=3_400_000)],
        tiers=[sandbox_pb2.TierUsage(provider="daytona", tier="parked", count=1, micro_usd_per_hour=170_000)],
    )
    usage.as_of.FromDatetime(NOW)
    return Picture(
        services=[
            Service(name, "127.0.0.1:7400", SERVING, "1.0", 1.0) for name in ("pool", "history", "relay", "sandbox")
        ],
        own_version="1.0",
        open_to_all=True,
        usage=usage,
        sandboxes=[sandbox()],
        reconciled=sandbox_service_pb2.ReconcileResponse(checked=1),
        replicas=[pool_pb2.Replica(holder=HOLDER)],
        stats=pool_service_pb2.GetPoolStatsResponse(holder=HOLDER),
        kept=frozenset({PARKED_ID}),
    )


def test_nothing_is_found_where_all_is_good() -> None:
    good = picture()
    assert findings(good) == []
    assert good.answered
    assert notes(good) == ["no authentication: whoever is on this machine may do everything"]


def test_a_certificate_that_counts_for_long_is_no_finding() -> None:
    good = picture()
    certified(7.1)(good)
    assert findings(good) == []


def test_a_certificate_that_was_not_looked_at_is_told() -> None:
    good = picture()
    certified(90.0)(good)
    good.encrypted = True
    good.services = [*good.services[:3], dataclasses.replace(good.services[3], certificate_days=None)]
    assert "nobody knows when the certificate of sandbox ends: it could not be looked at" in notes(good)
    assert sum("certificate" in note for note in notes(good)) == 1


def far(found: Picture, **changes: object) -> None:
    """The services are on another machine."""
    found.services = [dataclasses.replace(service, address="10.0.0.7:7400") for service in found.services]
    for name, value in changes.items():
        setattr(found, name, value)


def reconciled(**fields: object) -> Callable[[Picture], None]:
    def change(found: Picture) -> None:
        found.reconciled = sandbox_service_pb2.ReconcileResponse(**fields)  # type: ignore[arg-type]

    return change


def with_sandbox(seconds: float = 60.0, **fields: object) -> Callable[[Picture], None]:
    def change(found: Picture) -> None:
        found.sandboxes = [sandbox(seconds, **fields)]

    return change


def changed(*changes: Callable[[Picture], None]) -> Callable[[Picture], None]:
    def change(found: Picture) -> None:
        for one in changes:
            one(found)

    return change


def other_version(found: Picture) -> None:
    found.services = [dataclasses.replace(found.services[0], version="0.9"), *found.services[1:]]


def certified(days: float) -> Callable[[Picture], None]:
    """Those of all services but one count for long."""

    def change(found: Picture) -> None:
        found.services = [
            dataclasses.replace(service, certificate_days=days if service.name == "relay" else 90.0)
            for service in found.services
        ]

    return change


def over_the_cap(found: Picture) -> None:
    assert found.usage is not None
    found.usage.slots[0].used = 21


def warned(found: Picture) -> None:
    assert found.usage is not None
    assert found.stats is not None
    found.usage.warnings.extend(["HEARTH_X is 0", "HEARTH_Y is 0"])
    found.stats.warnings.append("HEARTH_X is 0")


def told_late(found: Picture) -> None:
    assert found.stats is not None
    found.stats.outbox_depth = 1_001


def all_draining(found: Picture) -> None:
    found.replicas = [pool_pb2.Replica(holder=HOLDER, draining=True)]


def limited(found: Picture) -> None:
    found.services = [
        dataclasses.replace(service, detail="valkey does not answer" if service.name == "relay" else "")
        for service in found.services
    ]


def nothing_kept(found: Picture) -> None:
    found.kept = frozenset()


@pytest.mark.parametrize(
    ("change", "about", "words"),
    [
        (limited, ["relay"], "relay serves only in part: valkey does not answer"),
        (other_version, ["version"], "pool is 0.9, this program is 1.0"),
        (far, ["access"], "no authentication"),
        (lambda found: far(found, open_to_all=False, has_token=True), ["access"], "unencrypted to 10.0.0.7:7400"),
        (certified(6.5), ["tls"], "the certificate of relay ends in 6 d 12 h"),
        (warned, ["settings", "settings"], "HEARTH_X is 0"),
        (reconciled(unanswered=["daytona"]), ["provider"], "daytona did not list"),
        (reconciled(lapsed=2), ["leak"], "2 sandboxes were renewed by nobody"),
        (reconciled(unknown=1, unknown_names=["hearth-a"]), ["unknown"], "1 instances are in no row (hearth-a)"),
        (reconciled(unknown=9, unknown_names=list("abcdefghi"), refused_unknown=True), ["unknown"], "(a, b, c, ...)"),
        (with_sandbox(tenure=sandbox_pb2.TENURE_ORPHAN, last_error="403"), ["orphan"], "since 1 min: 403"),
        (with_sandbox(observed=sandbox_pb2.SANDBOX_STATE_UNKNOWN), ["sandbox"], "in state unknown"),
        (with_sandbox(181, observed=sandbox_pb2.SANDBOX_STATE_STOPPING), ["sandbox"], "stopping since 3 min"),
        (with_sandbox(holder="gone"), ["leak"], "held by gone, which is no living replica"),
        (nothing_kept, ["leak"], "keeps no agent in it"),
        (over_the_cap, ["warm"], "21 sandboxes of daytona are kept running, 20 may be"),
        (told_late, ["outbox"], "1001 facts"),
        (all_draining, ["pool"], "no replica takes new turns"),
    ],
)
def test_what_is_wrong_is_found(change: Callable[[Picture], None], about: list[str], words: str) -> None:
    wrong = picture()
    change(wrong)
    found = findings(wrong)
    assert [finding.about for finding in found] == about
    assert words in found[0].message


def test_too_many_unknown_ones_wait_for_a_person() -> None:
    wrong = picture()
    reconciled(unknown=9, refused_unknown=True)(wrong)
    assert "hearth sandboxes reap --yes" in findings(wrong)[0].hint


@pytest.mark.parametrize(
    "change",
    [
        with_sandbox(60, observed=sandbox_pb2.SANDBOX_STATE_STOPPING),
        with_sandbox(1, holder="a replica that left a moment ago"),
        with_sandbox(tenure=sandbox_pb2.TENURE_FREE, holder="", observed=sandbox_pb2.SANDBOX_STATE_STOPPED),
        changed(nothing_kept, with_sandbox(1)),
        changed(nothing_kept, with_sandbox(tenure=sandbox_pb2.TENURE_ACTIVE)),
        lambda found: far(found, open_to_all=False),
        lambda found: setattr(found, "replicas", None),
        lambda found: setattr(found, "usage", None),
    ],
)
def test_what_is_on_its_way_or_not_known_is_no_finding(change: Callable[[Picture], object]) -> None:
    sound = picture()
    change(sound)
    assert findings(sound) == []


def test_what_needs_nobody_is_a_note() -> None:
    found = picture()
    assert found.usage is not None
    found.open_to_all = False
    found.usage.slots[0].used = 20
    found.reconciled = sandbox_service_pb2.ReconcileResponse(mended=3)
    found.replicas = [pool_pb2.Replica(holder=HOLDER), pool_pb2.Replica(holder="other", draining=True)]
    said = notes(found)
    assert [any(words in note for note in said) for words in ("3 rows differed", "all 20 warm slots", "other")] == [
        True,
        True,
        True,
    ]
    assert len(said) == 3
    assert findings(found) == []


@pytest.mark.parametrize("state", [NOT_SERVING, NO_ANSWER])
def test_a_service_that_does_not_serve_is_no_answer(state: str) -> None:
    found = picture()
    found.services = [*found.services[:3], dataclasses.replace(found.services[3], state=state)]
    assert not found.answered


def test_a_question_that_was_refused_is_an_answer_and_one_that_was_lost_is_none() -> None:
    found = picture()
    found.unchecked = {"usage": "needs an admin token"}
    assert found.answered
    found.unchecked = {"usage": NO_ANSWER}
    assert not found.answered


@pytest.mark.parametrize(
    ("address", "here"),
    [
        ("127.0.0.1:7400", True),
        ("localhost:7400", True),
        ("[::1]:7400", True),
        ("10.0.0.7:7400", False),
        ("pool:1", False),
        ("127.0.0.1:7400,127.0.0.1:7410", True),
        ("127.0.0.1:7400, 10.0.0.7:7400", False),
    ],
)
def test_addresses_of_this_machine(address: str, here: bool) -> None:
    assert loopback(address) is here
