"""What the answers of the services say about a deployment: findings for a person, each with what to do. Pure."""

from __future__ import annotations

import dataclasses
import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from hearth.cli import words
from hearth.pool.v1 import pool_pb2, pool_service_pb2
from hearth.sandbox.v1 import sandbox_pb2, sandbox_service_pb2

SERVING, NOT_SERVING, NO_ANSWER = "serving", "not serving", "no answer"
# A worker has its deadline and its successor another look; after that a sandbox hangs between two states.
LONGEST_TRANSITION = 180.0
# What changed a moment ago may look different to two services that were asked one after the other.
SETTLED = 5.0
OUTBOX_LIMIT = 1_000
# As the alert HearthCertificateEnds.
CERTIFICATE_DAYS = 7.0

_MOVING = frozenset(
    {
        sandbox_pb2.SANDBOX_STATE_CREATING,
        sandbox_pb2.SANDBOX_STATE_STARTING,
        sandbox_pb2.SANDBOX_STATE_STOPPING,
        sandbox_pb2.SANDBOX_STATE_DELETING,
    }
)
_UNCLEAR = frozenset({sandbox_pb2.SANDBOX_STATE_ERROR, sandbox_pb2.SANDBOX_STATE_UNKNOWN})
_HELD = frozenset({sandbox_pb2.TENURE_ACTIVE, sandbox_pb2.TENURE_PARKED})


@dataclasses.dataclass(frozen=True, slots=True)
class Service:
    """One of the four. `state` is `serving`, `not serving` or `no answer`; `detail` says why it is not the first, or
    what keeps one that serves from serving all.

    `certificate_days` are those for which the certificate that it shows still counts; None without TLS, or where that
    could not be looked at.
    """

    name: str
    address: str
    state: str
    version: str = ""
    milliseconds: float = 0.0
    detail: str = ""
    certificate_days: float | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as it should be. `about` is one word of what it concerns."""

    about: str
    message: str
    hint: str = ""


@dataclasses.dataclass(slots=True)
class Picture:
    """What the services answered; None where they did not, or where the caller may not ask.

    `kept` are the ids of the sandboxes in which the answering replica had an agent when the sandboxes were listed.
    `encrypted`: all was asked over TLS. `unchecked` names what was refused, with the reason; `open_to_all`: calls
    without a token are answered.
    """

    services: Sequence[Service]
    own_version: str
    has_token: bool = False
    open_to_all: bool = False
    encrypted: bool = False
    usage: sandbox_service_pb2.GetUsageResponse | None = None
    sandboxes: Sequence[sandbox_pb2.Sandbox] | None = None
    reconciled: sandbox_service_pb2.ReconcileResponse | None = None
    replicas: Sequence[pool_pb2.Replica] | None = None
    stats: pool_service_pb2.GetPoolStatsResponse | None = None
    kept: frozenset[str] = frozenset()
    unchecked: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def answered(self) -> bool:
        """Whether every service serves and every question that was allowed got an answer."""
        return all(service.state == SERVING for service in self.services) and NO_ANSWER not in self.unchecked.values()


def findings(picture: Picture) -> list[Finding]:
    """All of them, in the order in which a person should read them."""
    return [
        *_of_services(picture),
        *_of_versions(picture),
        *_of_access(picture),
        *_of_certificates(picture),
        *_of_settings(picture),
        *_of_reconciling(picture),
        *_of_sandboxes(picture),
        *_of_warmth(picture),
        *_of_pool(picture),
    ]


def notes(picture: Picture) -> list[str]:
    """What is worth knowing and needs nobody to act."""
    found = []
    if picture.open_to_all and all(loopback(service.address) for service in picture.services):
        found.append("no authentication: whoever is on this machine may do everything")
    if picture.reconciled is not None and picture.reconciled.mended:
        found.append(f"{picture.reconciled.mended} rows differed from what the providers list, and were mended")
    found += [
        f"nobody knows when the certificate of {service.name} ends: it could not be looked at"
        for service in picture.services
        if picture.encrypted and service.state != NO_ANSWER and service.certificate_days is None
    ]
    found += [
        f"all {slot.cap} warm slots of {slot.provider} are taken: further turns end stopped, or push out the oldest"
        for slot in (picture.usage.slots if picture.usage is not None else ())
        if slot.used == slot.cap > 0
    ]
    found += [f"replica {replica.holder} takes no new turns" for replica in picture.replicas or () if replica.draining]
    return found


def loopback(address: str) -> bool:
    """Whether a host:port is of this machine only; of the addresses of several replicas, whether each is."""
    return all(_loopback(one.strip().rpartition(":")[0].strip("[]")) for one in address.split(","))


def _loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _of_services(picture: Picture) -> Iterator[Finding]:
    for service in picture.services:
        if service.state == SERVING and service.detail:
            message = f"{service.name} serves only in part: {service.detail}"
            yield Finding(service.name, message, "bring back what does not answer")


def _of_versions(picture: Picture) -> Iterator[Finding]:
    for service in picture.services:
        if service.version and service.version != picture.own_version:
            message = f"{service.name} is {service.version}, this program is {picture.own_version}"
            yield Finding("version", message, "run one version of everything")


def _of_access(picture: Picture) -> Iterator[Finding]:
    far = [service.address for service in picture.services if not loopback(service.address)]
    if far and picture.open_to_all:
        yield Finding(
            "access",
            f"no authentication, and {', '.join(far)} is not of this machine only",
            "set HEARTH_AUTH_FILE for every service",
        )
    if far and picture.has_token and not picture.encrypted:
        yield Finding(
            "access",
            f"the token went unencrypted to {', '.join(far)}",
            "give the services certificates and set HEARTH_TLS_CA_FILE, or reach them through an encrypted network",
        )


def _of_certificates(picture: Picture) -> Iterator[Finding]:
    for service in picture.services:
        if service.certificate_days is not None and service.certificate_days < CERTIFICATE_DAYS:
            message = f"the certificate of {service.name} ends in {words.span(service.certificate_days * 86_400)}"
            yield Finding("tls", message, "put a new one in the place of its file; it is read again without a restart")


def _of_settings(picture: Picture) -> Iterator[Finding]:
    warnings = [*(picture.usage.warnings if picture.usage is not None else ())]
    warnings += picture.stats.warnings if picture.stats is not None else ()
    for warning in dict.fromkeys(warnings):
        yield Finding("settings", warning)


def _of_reconciling(picture: Picture) -> Iterator[Finding]:
    report = picture.reconciled
    if report is None:
        return
    for provider in report.unanswered:
        yield Finding("provider", f"{provider} did not list its instances", "see the log of the sandbox service")
    if report.lapsed:
        message = f"{report.lapsed} sandboxes were renewed by nobody and were ended"
        yield Finding("leak", message, "a pool process died or lost its database")
    if report.unknown:
        names = ", ".join(report.unknown_names[:3]) + (", ..." if report.unknown > 3 else "")
        message = f"{report.unknown} instances are in no row ({names})"
        if report.refused_unknown:
            hint = "too many to delete unasked: look at them, then `hearth sandboxes reap --yes`"
        else:
            hint = "they were deleted now"
        yield Finding("unknown", message, hint)


def _of_sandboxes(picture: Picture) -> Iterator[Finding]:
    if picture.sandboxes is None:
        return
    now = picture.usage.as_of.ToDatetime(UTC) if picture.usage is not None else datetime.now(UTC)
    alive = None if picture.replicas is None else {replica.holder for replica in picture.replicas}
    for sandbox in picture.sandboxes:
        what = f"sandbox {sandbox.sandbox_id} on {sandbox.provider}"
        age = (now - sandbox.changed_at.ToDatetime(UTC)).total_seconds()
        trouble = f": {sandbox.last_error}" if sandbox.last_error else ""
        if sandbox.tenure == sandbox_pb2.TENURE_ORPHAN:
            message = f"{what} is not shown gone since {words.span(age)}{trouble}"
            yield Finding("orphan", message, "it counts as running and is deleted again at every pass; look there")
        elif sandbox.observed in _UNCLEAR:
            yield Finding("sandbox", f"{what} is in state {words.state(sandbox.observed)}{trouble}")
        elif sandbox.observed in _MOVING and age > LONGEST_TRANSITION:
            state = words.state(sandbox.observed)
            yield Finding("sandbox", f"{what} is {state} since {words.span(age)}{trouble}", "is the provider well?")
        elif sandbox.tenure in _HELD and alive is not None and sandbox.holder not in alive and age > SETTLED:
            message = f"{what} is held by {sandbox.holder or 'nobody'}, which is no living replica"
            yield Finding("leak", message, "it is ended when its lease is over, within 2 minutes")
        elif _forgotten(picture, sandbox) and age > SETTLED:
            message = f"{what} is parked by a replica that keeps no agent in it"
            yield Finding("leak", message, f"`hearth sandboxes delete {sandbox.sandbox_id}`, and report a defect")


def _forgotten(picture: Picture, sandbox: sandbox_pb2.Sandbox) -> bool:
    return (
        sandbox.tenure == sandbox_pb2.TENURE_PARKED
        and picture.stats is not None
        and sandbox.holder == picture.stats.holder
        and sandbox.sandbox_id not in picture.kept
    )


def _of_warmth(picture: Picture) -> Iterator[Finding]:
    for slot in picture.usage.slots if picture.usage is not None else ():
        if slot.used > slot.cap:
            message = f"{slot.used} sandboxes of {slot.provider} are kept running, {slot.cap} may be"
            yield Finding("warm", message, "the cap was lowered, or this is a defect")


def _of_pool(picture: Picture) -> Iterator[Finding]:
    if picture.stats is not None and picture.stats.outbox_depth > OUTBOX_LIMIT:
        yield Finding("outbox", f"{picture.stats.outbox_depth} facts wait to be told to history", "does history serve?")
    if picture.replicas is not None and not any(not replica.draining for replica in picture.replicas):
        yield Finding("pool", "no replica takes new turns", "start one")
