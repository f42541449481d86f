"""Runs: start, subscribers, event log, stored outcomes, retries and cancellation."""
