"""The agent loop, its events and its history. These modules do not depend on HTTP."""
