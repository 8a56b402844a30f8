"""Sockets under trio, below the daemon and its clients: who is there, sending, receiving, accepting."""
