"""Real coding agents through Hearth, offline: their models are the stand-in of `tests.support.models`."""
