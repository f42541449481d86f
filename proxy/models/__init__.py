"""Doors to language models."""
