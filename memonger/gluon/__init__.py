"""Planned training of Gluon's HybridBlocks, in the training loop as it is."""

from memonger.gluon.planning import plan, plan_of, unplan

__all__ = ["plan", "plan_of", "unplan"]
