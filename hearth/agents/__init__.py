"""Agents that ship with Hearth."""
