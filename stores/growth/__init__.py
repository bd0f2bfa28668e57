"""Stores that grow: what is appended waits in one LMDB environment, readers see it, `compact` folds it into the arrays."""
