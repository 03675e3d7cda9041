"""Plan the training of Gluon's HybridBlocks, without a change of the training loop."""

from memonger.gluon.planning import plan, plan_of, unplan

__all__ = ["plan", "plan_of", "unplan"]
