"""Train MXNet 1.9 networks in a fraction of the memory, without changing what they learn."""

from memonger._mxnet import mx as _mx  # noqa: F401  first: it makes MXNet importable
from memonger.batches import LargestBatch, largest_batch
from memonger.checking import CheckReport, check
from memonger.choices import PlanExplanation
from memonger.errors import BudgetError, MemongerError
from memonger.explanation import Explanation, explain
from memonger.frontiers import Frontier, frontier
from memonger.marks import unplan
from memonger.plans import Plan, plan
from memonger.search import get_cost, make_mirror_plan, pool_bytes, search_plan
from memonger.symbol_file import load

__version__ = "1.0.0.dev0"

__all__ = [
    "BudgetError",
    "CheckReport",
    "Explanation",
    "Frontier",
    "LargestBatch",
    "MemongerError",
    "Plan",
    "PlanExplanation",
    "check",
    "explain",
    "frontier",
    "get_cost",
    "largest_batch",
    "load",
    "make_mirror_plan",
    "plan",
    "pool_bytes",
    "search_plan",
    "unplan",
]
