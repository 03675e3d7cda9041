"""The memory of a GPU that a network takes in training: the pool, and what it is bound to.

MXNet asks CUDA for every array by itself and rounds what it asks for: to pages, above 2 MB to
blocks of 2 MB (``src/storage/pooled_storage_manager.h``). The blocks of the pool are arrays too.
Gradients of outputs are allocated where an operator reads them (``InitDataEntryMemory`` in
``src/executor/graph_executor.cc``).
"""

from __future__ import annotations

import os
from typing import Any, Iterable

import numpy as np

from memonger.costs.allocator import Replay
from memonger.costs.held import Held
from memonger.graph.operators.recompute import GPU
from memonger.graph.operators.tensors import Tensor

PAGE = 4096
LARGE = 2 * 2**20


def rounded(nbytes: Any) -> np.ndarray:
    """What MXNet asks a GPU for, for arrays of these sizes, in bytes.

    Parameters
    ----------
    nbytes : array of int

    Notes
    -----
    Follows ``MXNET_GPU_MEM_POOL_TYPE`` ('Naive' by default, 'Round' or 'Unpooled') and the settings
    of each: ``MXNET_GPU_MEM_POOL_PAGE_SIZE``, ``MXNET_GPU_MEM_LARGE_ALLOC_ROUND_SIZE``,
    ``MXNET_GPU_MEM_POOL_ROUND_LINEAR_CUTOFF``.
    """
    sizes = np.asarray(nbytes, dtype=np.int64)
    kind = os.environ.get("MXNET_GPU_MEM_POOL_TYPE", "Naive")
    page = int(os.environ.get("MXNET_GPU_MEM_POOL_PAGE_SIZE", PAGE))
    if kind == "Unpooled":
        return sizes
    if kind == "Round":  # to powers of two, above the cutoff to its multiples
        cutoff = 1 << int(os.environ.get("MXNET_GPU_MEM_POOL_ROUND_LINEAR_CUTOFF", "24"))
        powers = np.array([1 << max(int(n) - 1, 0).bit_length() for n in sizes.ravel()])
        small = np.maximum(powers.reshape(sizes.shape), page)
        return np.where(sizes > cutoff, _up(sizes, cutoff), np.where(sizes > 0, small, 0))
    large = int(os.environ.get("MXNET_GPU_MEM_LARGE_ALLOC_ROUND_SIZE", LARGE))
    pages = _up(sizes, page)
    return np.where(pages > large, _up(pages, large), pages)


def _up(sizes: np.ndarray, multiple: int) -> np.ndarray:
    return (sizes + multiple - 1) // multiple * multiple


def device_bytes(found: Replay, gradients: Iterable[Tensor], held: Held, pool_bytes: int) -> int:
    """Bytes of a device that a training step takes, for a network that is bound as it was replayed.

    The pool, the variables (arguments, auxiliary states, and the gradients of outputs where they
    are read), gradients, and what operators hold; each rounded as MXNet rounds it on a GPU. Without
    the state of an optimiser, cuDNN's workspaces, and what CUDA and its libraries take for
    themselves.

    Parameters
    ----------
    found : Replay
    gradients : iterable of Tensor
        Those that are written to arrays of their own.
    held : Held
        By operators, and on which device.
    pool_bytes : int
        Of the pool as MXNet allocates it. Where that is not what was replayed, the blocks are taken
        to be as many, each larger or smaller by the same factor.
    """
    tables, blocks = found.training.tables, found.block_bytes()
    if pool_bytes != blocks.sum():
        blocks = np.ceil(blocks * (pool_bytes / max(1, blocks.sum()))).astype(np.int64)
    variables = found.order[tables.variable[found.order]]
    arrays = [
        blocks,
        (tables.elements * tables.itemsize)[tables.output_start[variables]],
        np.array([tensor.nbytes for tensor in gradients], dtype=np.int64),
        np.array([*held.arrays, held.temporary], dtype=np.int64),
    ]
    nbytes = np.concatenate(arrays)
    return int((rounded(nbytes) if held.device_type == GPU else nbytes).sum())
