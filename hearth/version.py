"""Which version this is, and how a service tells it: in the trailing metadata of each health check."""

from __future__ import annotations

from importlib import metadata

VERSION_KEY = "hearth-version"


def version() -> str:
    """Of the installed package, as `0.1.0`."""
    return metadata.version("hearth")
