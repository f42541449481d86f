"""Decisions about requests and runs: frozen values and pure functions without I/O."""
