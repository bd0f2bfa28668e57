"""Runs: what is composed of a configuration, the loop, checkpoints and results."""
