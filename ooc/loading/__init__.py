"""From seeds to batches: superbatches, shared scans, the feature cache, and the loaders."""
