"""Programs that are measured beside ours, each run in a process of its own."""
