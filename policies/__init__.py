"""DECIDE. Frozen values and pure functions; nothing here reads the world."""
