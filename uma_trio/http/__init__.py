"""The HTTP front: APIs that existing clients speak, on the service. No tokens, no plans.

`wire` is HTTP itself. `openai`, `anthropic`, `responses`, `llama` and `ollama` have one API each. The modules beside
them are what the APIs share (`fields`, `asking`, `api`, `blocks`, ...), endpoints of no API of another, and `routes`.
"""
