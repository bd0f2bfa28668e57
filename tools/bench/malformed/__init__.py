"""Malformed inputs and settings: each must be refused in one line, quickly, with nothing left behind."""
