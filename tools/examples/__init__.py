"""Scripts to copy: the demo, and training on events and snapshots."""
