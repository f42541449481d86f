"""Sandboxes for a language model: backends, pool, tools and egress. The package knows neither the
model nor the HTTP API."""
