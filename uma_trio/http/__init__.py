"""HTTP on h11: server, guard, router, stream writer, and the page."""
