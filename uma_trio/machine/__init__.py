"""The compute thread: one deadline scheduler for the work of all models."""
