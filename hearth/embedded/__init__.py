"""Servers that Hearth brings along as wheels, for a machine that has none: Postgres and Valkey."""
