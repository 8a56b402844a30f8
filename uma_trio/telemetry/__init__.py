"""Metrics and logs, declared once."""
