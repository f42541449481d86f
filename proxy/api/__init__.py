"""The HTTP routes, one module for each API, and the functions that the routes share."""
