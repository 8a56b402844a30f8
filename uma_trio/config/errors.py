"""The error about a setting."""

from __future__ import annotations


class ConfigError(Exception):
    """A flag, environment variable or YAML key cannot be used; the message says which and why."""
