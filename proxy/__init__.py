"""The server: the HTTP APIs, the agent loop, the model backends and the stored data."""
