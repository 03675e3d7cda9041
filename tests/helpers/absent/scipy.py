"""Stands before the package of this name, which MXNet imports where it can."""

raise ImportError("the tests hide it: it takes a third of the time in which MXNet is imported")
