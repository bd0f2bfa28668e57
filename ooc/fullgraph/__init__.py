"""Exact training on the whole graph: a step as a program of ops, placed and executed in bounded memory."""
