"""The memory of a plan: the pool as MXNet counts it, and all that a step takes of a device.

The pool is replayed where the replay is exact, and bound where it is not.

MXNet asks CUDA for every array by itself and rounds what it asks for: to pages, above 2 MB to
blocks of 2 MB (``src/storage/pooled_storage_manager.h``). The blocks of the pool are arrays too.
Gradients of outputs are allocated where an operator reads them (``InitDataEntryMemory`` in
``src/executor/graph_executor.cc``).
"""

from __future__ import annotations

import logging
from typing import Any, Iterable

import numpy as np

from memonger.costs.bind import bind, planned_mb
from memonger.costs.fusion import replay_fused
from memonger.costs.held import Held
from memonger.costs.replay import Replay, replay
from memonger.graph import marks
from memonger.graph.forward import ForwardGraph
from memonger.graph.operators.recompute import GPU
from memonger.graph.operators.tensors import Tensor
from memonger.graph.training import TrainingGraph
from memonger.support.errors import MB
from memonger.support.mxnet import settings

log = logging.getLogger("memonger")


class CostModel:
    """The pool of plans of one network, in bytes as MXNet counts them (4 to an element).

    The replay is trusted if it knows everything about the network and agrees with one bind of the
    unplanned network; otherwise every plan is bound, which tells whole MB, and the log says why.

    ``bound`` is what MXNet plans for the unplanned network as it will be trained, in whole MB;
    ``unplanned`` is the same in bytes, if plans are replayed (``exact``). ``fuses`` says whether
    the network is trained with pointwise fusion.
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
            replayed = f"it gives {self.unplanned // MB} MB for the unplanned network"
            why = f"{replayed}, MXNet {self.bound} MB"
        self.exact = not why
        if why:
            self.unplanned = self.bound * MB
            log.info("the replay of memory is not exact, so each plan is bound: %s", why)
        self._known: dict[bytes, int] = {nothing.tobytes(): self.unplanned}

    def __call__(self, mask: np.ndarray) -> int:
        """Return the pool of the plan that recomputes the nodes in ``mask``."""
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


def rounded(nbytes: Any) -> np.ndarray:
    """Return what MXNet asks a GPU for, for arrays of these sizes, in bytes (``Settings.pool``)."""

    def up(sizes: np.ndarray, multiple: int) -> np.ndarray:
        return (sizes + multiple - 1) // multiple * multiple

    sizes, pool = np.asarray(nbytes, dtype=np.int64), settings().pool
    if pool.kind == "Unpooled":
        return sizes
    if pool.kind == "Round":  # to powers of two, above the cutoff to its multiples
        powers = np.array([1 << max(int(n) - 1, 0).bit_length() for n in sizes.ravel()])
        small = np.maximum(powers.reshape(sizes.shape), pool.page)
        small[sizes == 0] = 0
        return np.where(sizes > pool.cutoff, up(sizes, pool.cutoff), small)
    pages = up(sizes, pool.page)
    return np.where(pages > pool.large, up(pages, pool.large), pages)


def device_bytes(found: Replay, gradients: Iterable[Tensor], held: Held, pool_bytes: int) -> int:
    """Return the bytes of a device that a training step takes, bound as it was replayed.

    They are the pool, the variables (arguments, auxiliary states, and the gradients of outputs
    where they are read), ``gradients`` that are written to arrays of their own, and what operators
    hold; each rounded as MXNet rounds it on a GPU. The state of an optimiser, cuDNN's workspaces,
    and what CUDA and its libraries take for themselves are not counted.

    ``pool_bytes`` are those of the pool as MXNet allocates it. Where that is not what was replayed,
    the blocks are taken to be as many, each larger or smaller by the same factor.
    """
    t, blocks = found.training.tables, found.block_bytes()
    if pool_bytes != blocks.sum():
        blocks = np.ceil(blocks * (pool_bytes / max(1, blocks.sum()))).astype(np.int64)
    variables = t.output_start[found.order[t.variable[found.order]]]
    others = [*[tensor.nbytes for tensor in gradients], *held.arrays, held.temporary]
    nbytes = np.concatenate([blocks, t.elements[variables] * t.itemsize[variables], others])
    return int((rounded(nbytes) if held.device_type == GPU else nbytes).sum())
