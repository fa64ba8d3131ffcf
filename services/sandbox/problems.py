"""The errors that callers of this service see, each made in one place."""

from __future__ import annotations

from services.chassis.errors import (
    Aborted,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Resource,
    Unavailable,
    invalid,
)
from services.sandbox.claims import Claim
from services.sandbox.providers.port import ProviderRefused

_RETRY_SECONDS = 1.0


def fenced(current: Claim) -> FailedPrecondition:
    """A claim that is lower than `current`, closed, or held by somebody else."""
    return FailedPrecondition(
        f"the claim does not stand: epoch {current.epoch}, attempt {current.attempt} was reached; drop what you hold",
        reason="FENCED",
        metadata={"epoch": str(current.epoch), "attempt": str(current.attempt)},
    )


def sandbox_not_found(what: str) -> NotFound:
    """`what` names the sandbox or the session that has none."""
    return NotFound(
        f"there is no sandbox {what}", reason="SANDBOX_NOT_FOUND", resource=Resource("hearth.dev/Sandbox", what)
    )


def unknown_provider(field: str, name: str, known: list[str]) -> InvalidArgument:
    """A spec that names a provider that is not switched on."""
    return invalid(field, f"{name!r} is not switched on here; known are {', '.join(known)}", reason="UNKNOWN_PROVIDER")


def unknown_agent(field: str, name: str, known: list[str]) -> InvalidArgument:
    """A spec that names an agent that is not set up."""
    return invalid(field, f"{name!r} is not in HEARTH_AGENTS; known are {', '.join(known)}", reason="UNKNOWN_AGENT")


def provider_refused(error: ProviderRefused, field: str) -> FailedPrecondition:
    """The provider will never do it; `field` is the path of the spec in the request."""
    path = f"{field}.{error.field}" if error.field else field
    return FailedPrecondition(str(error), reason="PROVIDER_REFUSED", field_violations=((path, str(error)),))


def provider_unavailable(error: Exception) -> Unavailable:
    """The provider did not do it in time."""
    return Unavailable(f"the provider failed: {error}", reason="PROVIDER_UNAVAILABLE", retry_after=_RETRY_SECONDS)


def daemon_unreachable(error: Exception) -> Unavailable:
    """A new sandbox whose daemon does not come up."""
    return Unavailable(
        f"the agent daemon did not start: {error}", reason="DAEMON_UNREACHABLE", retry_after=_RETRY_SECONDS
    )


def sandbox_busy() -> Aborted:
    """Others worked on the sandbox for longer than anybody may."""
    return Aborted("other calls kept this sandbox busy; send the call again", reason="SANDBOX_BUSY")
