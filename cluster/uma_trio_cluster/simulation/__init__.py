"""Several machines in virtual time: fluid nodes, an edge that places requests on them, and what it knows."""
