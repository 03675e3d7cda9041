"""The public names, from the files that define them; to import them takes seconds."""

from memonger import gluon
from memonger.api.check import CheckReport, check
from memonger.api.frontier import frontier, largest_batch
from memonger.api.plan import Plan
from memonger.api.planning import (
    get_cost,
    make_mirror_plan,
    plan,
    pool_bytes,
    search_plan,
    search_plan_to_layer,
)
from memonger.api.results import Frontier, LargestBatch
from memonger.api.saved import load_plan
from memonger.graph.marks import unplan
from memonger.scripts.session import Session, disable, enable
from memonger.show.explain import Explanation, PlanExplanation, explain
from memonger.support.errors import BudgetError, MemongerError
from memonger.support.symbols import load

__all__ = [
    "BudgetError",
    "CheckReport",
    "Explanation",
    "Frontier",
    "LargestBatch",
    "MemongerError",
    "Plan",
    "PlanExplanation",
    "Session",
    "check",
    "disable",
    "enable",
    "explain",
    "frontier",
    "get_cost",
    "gluon",
    "largest_batch",
    "load",
    "load_plan",
    "make_mirror_plan",
    "plan",
    "pool_bytes",
    "search_plan",
    "search_plan_to_layer",
    "unplan",
]
