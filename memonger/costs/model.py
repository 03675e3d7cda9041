"""What a set of recomputed operators costs: replayed where the replay is exact, bound where not."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np

from memonger.costs.allocator import replay
from memonger.costs.bind import bind, planned_mb
from memonger.costs.fusion import replay_fused
from memonger.graph import marks
from memonger.graph.forward import ForwardGraph
from memonger.graph.training import TrainingGraph
from memonger.support.errors import MB as MB

log = logging.getLogger("memonger")


class CostModel:
    """The memory of plans of one network, in bytes as MXNet counts them (4 to an element).

    The replay is trusted if it knows everything about the network and agrees with one bind of the
    unplanned network; otherwise every plan is bound, which tells whole MB, and the log says why.

    Parameters
    ----------
    symbol, graph, training, ctx
        The network, what is known of it, and where it is bound.
    fuses : bool
        Whether it is trained there with pointwise fusion.

    Attributes
    ----------
    bound : int
        What MXNet plans for the unplanned network as it will be trained, in whole MB.
    """

    def __init__(
        self,
        symbol: Any,
        graph: ForwardGraph,
        training: TrainingGraph,
        ctx: Any,
        fuses: bool = False,
    ) -> None:
        self.symbol, self.graph, self.training, self.ctx = symbol, graph, training, ctx
        self._replay = replay_fused if fuses else replay
        nothing = np.zeros(len(graph.nodes), dtype=np.bool_)
        self.bound = self._bound(symbol)
        self.unplanned = self._replay(training, nothing).pool_bytes
        why = "; ".join(training.inexact)
        if not why and self.unplanned // MB != self.bound:
            why = "it gives %d MB for the unplanned network, MXNet %d MB" % (
                self.unplanned // MB,
                self.bound,
            )
        self.exact = not why
        if why:
            self.unplanned = self.bound * MB
            log.info("each plan is bound to learn its memory, for the replay is not exact: %s", why)
        self._known: dict[bytes, int] = {nothing.tobytes(): self.unplanned}

    def __call__(self, mask: np.ndarray) -> int:
        key = mask.tobytes()
        if key not in self._known:
            self._known[key] = (
                self._replay(self.training, mask).pool_bytes
                if self.exact
                else MB * self._bound(marks.apply(self.symbol, mask))
            )
        return self._known[key]

    def _bound(self, symbol: Any) -> int:
        return planned_mb(bind(symbol, self.graph, self.ctx, self.training.wanted))
