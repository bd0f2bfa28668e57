"""Checks of what is released, and the recipe of the conda package."""
