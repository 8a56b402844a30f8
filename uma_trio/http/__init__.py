"""The HTTP front: what speaks to OpenAI's API or to llama-server, on the service. No tokens, no plans."""
