"""What a set of recomputed operators costs: replayed where the replay is exact, bound where not."""

import logging
from typing import Any, Dict

import numpy as np

from memonger import marks
from memonger.allocator import replay
from memonger.executor import bind, planned_mb
from memonger.forward import ForwardGraph
from memonger.training import TrainingGraph

log = logging.getLogger("memonger")
MB = 2**20


class CostModel:
    """The memory of plans of one network, in MB as ``debug_str`` reports it.

    The replay is trusted if it knows everything about the network and agrees with one bind of the
    unplanned network; otherwise every plan is bound, and the log says why.
    """

    def __init__(self, symbol: Any, graph: ForwardGraph, training: TrainingGraph, ctx: Any) -> None:
        self.symbol, self.graph, self.training, self.ctx = symbol, graph, training, ctx
        nothing = np.zeros(len(graph.nodes), dtype=np.bool_)
        self.unplanned = planned_mb(bind(symbol, graph, ctx))
        self._known: Dict[bytes, int] = {}
        replayed = replay(training, nothing).pool_bytes // MB
        why = "; ".join(training.inexact)
        if not why and replayed != self.unplanned:
            why = "it gives %d MB for the unplanned network, MXNet %d MB" % (replayed, self.unplanned)
        self.exact = not why
        if why:
            log.info("memory is measured by binding each plan, for the replay is not exact: %s", why)

    def __call__(self, mask: np.ndarray) -> int:
        key = mask.tobytes()
        if key not in self._known:
            self._known[key] = self._cost(mask)
        return self._known[key]

    def _cost(self, mask: np.ndarray) -> int:
        if not mask.any():
            return self.unplanned
        if self.exact:
            return replay(self.training, mask).pool_bytes // MB
        return planned_mb(bind(marks.apply(self.symbol, mask), self.graph, self.ctx))
