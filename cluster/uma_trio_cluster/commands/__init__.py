"""The command that this distribution adds to `uma-trio`."""
