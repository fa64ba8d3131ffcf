"""Programs that show how Hearth is used."""
