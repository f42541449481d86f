"""Reinforcement learning in a sandbox: tasks made from contexts, and their rewards.

The command line is `sandbox-train`.
"""
