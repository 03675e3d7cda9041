"""Planners: one file a strategy. They know graphs and numbers, not MXNet."""
