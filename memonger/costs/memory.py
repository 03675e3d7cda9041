"""All that a training step takes of a device.

MXNet asks CUDA for every array by itself and rounds what it asks for: to pages, above 2 MB to
blocks of 2 MB (``src/storage/pooled_storage_manager.h``). The blocks of the pool are arrays too.
Gradients of outputs are allocated where an operator reads them (``InitDataEntryMemory`` in
``src/executor/graph_executor.cc``).
"""

from __future__ import annotations

from typing import Any, Iterable

import numpy as np

from memonger.costs.held import Held
from memonger.costs.replay import Replay
from memonger.graph.operators.recompute import GPU
from memonger.graph.operators.tensors import Tensor
from memonger.support.mxnet import settings


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
    where they are read), ``gradients`` that have arrays of their own, and what operators hold; each
    rounded as MXNet rounds it on a GPU. Where ``pool_bytes``, as MXNet allocates it, is not what
    was replayed, the blocks are taken to be larger or smaller by one factor.
    """
    t, blocks = found.training.tables, found.block_bytes()
    if pool_bytes != blocks.sum():
        blocks = np.ceil(blocks * (pool_bytes / max(1, blocks.sum()))).astype(np.int64)
    variables = t.output_start[found.order[t.variable[found.order]]]
    others = [*[tensor.nbytes for tensor in gradients], *held.arrays, held.temporary]
    nbytes = np.concatenate([blocks, t.elements[variables] * t.itemsize[variables], others])
    return int((rounded(nbytes) if held.device_type == GPU else nbytes).sum())
