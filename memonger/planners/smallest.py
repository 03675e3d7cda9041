"""The smallest of no plan and the original's, on the user's marks and on cuts that are found."""

from typing import Callable, Dict, List, Mapping, NamedTuple, Tuple

import numpy as np

from memonger.forward import ForwardGraph
from memonger.planners import chen2016
from memonger.planners.cuts import single_tensor_cuts


class Smallest(NamedTuple):
    """The recomputed nodes, what they cost in bytes, and the candidates' costs by name."""

    mask: np.ndarray
    cost: int
    candidates: Dict[str, int]


def smallest(
    graph: ForwardGraph,
    stages: Mapping[int, str],
    cost: Callable[[np.ndarray], int],
    rules: Callable[[np.ndarray], np.ndarray],
    ntrial: int = 6,
) -> Smallest:
    """The cheapest of no plan and the original's search on two sets of stages.

    Parameters
    ----------
    graph : ForwardGraph
    stages : dict
        The user's ``mirror_stage`` marks.
    cost : callable
        The bytes that a set of recomputed nodes costs.
    rules : callable
        The part of a set of recomputed nodes that may be recomputed; what is returned obeys it, and
        it is the plan with the rules that is costed.
    ntrial : int
        As for the original's search.
    """
    nothing = np.zeros(len(graph.nodes), dtype=np.bool_)
    found: List[Tuple[int, np.ndarray]] = [(cost(nothing), nothing)]
    candidates = {"no plan": found[0][0]}
    automatic = dict.fromkeys(single_tensor_cuts(graph), "True")
    for name, marked in (("your marks", stages), ("single-tensor cuts", automatic)):
        if marked:
            trials = chen2016.search(graph, marked, lambda mask: cost(rules(mask)), ntrial)
            trial = chen2016.best(trials)
            found.append((trial.cost, rules(trial.plan.mask)))
            candidates[name] = trial.cost
    least, mask = min(found, key=lambda pair: pair[0])  # of equals the first: no plan
    return Smallest(mask, least, candidates)
