"""Stores far away: their copies in the cache, and their upload."""
