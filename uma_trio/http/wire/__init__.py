"""HTTP itself: connections, heads, bodies and events; who may come in. No API."""
