"""Runs as they go on: begun, heard by whoever listens, found again, ended."""
