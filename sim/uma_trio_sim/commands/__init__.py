"""The commands that this distribution adds to `uma-trio`: a module each, named after its verb."""
