"""uma-trio: one machine, one model in memory, many applications."""

__version__ = "0.1.0"
