"""The OpenAI-compatible HTTP server; it knows an engine only by its public methods."""
