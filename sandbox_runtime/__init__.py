"""ACT. Sandboxes for a language model; this package knows neither the model nor the HTTP API."""
