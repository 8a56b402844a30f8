"""The continuous-batching core and its two doors."""
