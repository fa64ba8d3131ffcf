"""The guarantees of history, against a running service."""
