"""Scores of nodes and links, and the EdgeBank baseline."""
