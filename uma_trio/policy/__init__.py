"""Pure functions from a state to a plan; no trio, no clock, no llama."""
