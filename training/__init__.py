"""Reinforcement learning in a sandbox: tasks made from contexts, their rewards, and rollouts for
trainers.

The command line is `sandbox-train`.
"""
