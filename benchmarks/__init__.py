"""Benchmarks of history and relay: real processes, real stores, every result checked. See README.md."""
