"""The prefix cache: computed cells are used again, for exactly the same tokens."""
