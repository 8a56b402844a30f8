"""What computes: the contract, a deterministic fake, and llama.cpp."""
