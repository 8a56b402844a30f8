"""Fuzzing of the wire protocol; see README.md in this folder."""
