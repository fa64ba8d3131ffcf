"""Pure parts of history."""
