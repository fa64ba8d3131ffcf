"""The schema `pool`, revision by revision."""
