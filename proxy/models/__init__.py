"""The clients of model backends (OpenAI-compatible HTTP, litellm, a script) and their wrappers."""
