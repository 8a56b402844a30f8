"""Sockets under trio, for the daemon and its clients: listening, accepting, peers, sending, receiving, handover."""
