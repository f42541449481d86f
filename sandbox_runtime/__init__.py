"""ACT. A virtual computer for a language model; knows no model and no HTTP API of ours."""
