"""Models of temporal graphs and the state of nodes over time."""
