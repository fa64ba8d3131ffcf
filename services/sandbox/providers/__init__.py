"""Where sandboxes run: one port, one implementation for each kind of place."""
