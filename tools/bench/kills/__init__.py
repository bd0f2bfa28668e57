"""Runs and appends that are killed anywhere and go on."""
