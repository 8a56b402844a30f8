"""How a request spent its time, and why it waits: what the engine recorded, as values and as sentences."""
