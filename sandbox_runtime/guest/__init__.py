"""The guest agent: the program that serves the host inside a sandbox, and how to start it."""
