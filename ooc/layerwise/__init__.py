"""Models run layer by layer over all nodes, with all edges, in bounded memory."""
