"""Runs and appends that are killed at random points and continued."""
