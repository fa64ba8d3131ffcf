"""Revisions of the schema `history`."""
