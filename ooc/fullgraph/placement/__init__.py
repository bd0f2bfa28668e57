"""PURE: where each value of an exact step is kept (memory, disk or recomputed), and what that costs."""
