"""OpenAI's text endpoints and its list of models."""
