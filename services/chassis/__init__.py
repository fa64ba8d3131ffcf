"""What every service stands on: settings, start and stop, auth, errors, telemetry, database, bus."""
