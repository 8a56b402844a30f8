"""The storyteller: everything that makes the bundled model, see README.md."""
