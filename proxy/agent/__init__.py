"""The agent loop, its events and its history. Knows no HTTP."""
