"""The daemon process: builds the parts, starts, drains, stops, is replaced."""
