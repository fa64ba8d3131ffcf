"""A small service on the chassis: what the chassis promises is tested on real processes of it."""
