"""Pipeline, buffers, memory, transfer to devices, and keyed randomness."""
