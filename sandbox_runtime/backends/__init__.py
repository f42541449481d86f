"""The backends, which start guest agents in isolation: Docker containers and bubblewrap
sandboxes."""
