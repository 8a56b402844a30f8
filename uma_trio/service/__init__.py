"""What the daemon does for its fronts: requests in, streams of tokens out, and the admin verbs."""
