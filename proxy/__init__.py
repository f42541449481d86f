"""SERVE. HTTP in, HTTP out, the agent loop in between."""
