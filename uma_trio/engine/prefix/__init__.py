"""The prefix cache: computed cells are used again, and never change an answer."""
