"""Exact training over several processes: each computes a range of nodes, and gets the rows of its halo from those that compute
them."""
