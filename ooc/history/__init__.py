"""Historical embeddings on disk: pull, push, refresh, and how far they have drifted."""
