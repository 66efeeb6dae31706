"""The bundle format: all that export and runtime share."""
