"""Audit logs of runs, in which any later change shows."""
