"""Reads and writes of byte ranges: planners, and the engines that execute their plans."""
