"""Egress: the host decides on, makes and relays the network connections of a sandbox."""
