"""Peers: other programs that are measured too, each in a process of its own."""
