"""Searches for plans. They work on graphs and numbers, and do not import MXNet."""
