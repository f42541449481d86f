"""Tamper-evident audit logs of runs."""
