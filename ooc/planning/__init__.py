"""PURE: predicts the memory, bytes and seconds of a run from a profile of a few batches."""
