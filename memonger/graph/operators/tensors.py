"""Shapes and types of the inputs and outputs of operators."""

from __future__ import annotations

import math
from typing import Mapping, NamedTuple, Tuple

import numpy as np

from memonger.support.errors import TooLargeError
from memonger.support.mxnet import mx

Shape = Tuple[int, ...]
Attributes = Mapping[str, str]  # an operator's own parameters, by name


DENSE = "default"  # MXNet's name for dense storage
STORAGE = "__storage_type__"  # attribute of a variable: the number of its storage type
DENSE_NUMBERS = "-1", "0"  # -1 is unknown, which is dense


class Tensor(NamedTuple):
    """Shape, NumPy type name and storage type of one output of a node."""

    shape: Shape
    dtype: str
    stype: str = DENSE  # or 'csr' or 'row_sparse'

    @property
    def elements(self) -> int:
        """The number of elements; 0 for a sparse tensor, which MXNet allocates outside the pool."""
        return math.prod(self.shape) if self.stype == DENSE else 0

    @property
    def nbytes(self) -> int:
        return self.elements * np.dtype(self.dtype).itemsize


Tensors = Tuple[Tensor, ...]


#: The most elements of a tensor that MXNet counts in an int32, and those that its kernels of a GPU
#: do. Of at most 65535 blocks of 256 threads, each thread adds their number to the index of its
#: element until it is past the last one (``mxnet_generic_kernel`` in ``src/operator/mxnet_op.h``).
#: Nearer to 2**31 the sum overflows: an H200 then said "an illegal memory access".
MOST = 2**31 - 1
MOST_ON_GPU = MOST - 65535 * 256


def check_elements(shape: Shape, most: int = MOST) -> Shape:
    """Return a shape; raise TooLargeError if it has more elements than MXNet can count."""
    if math.prod(shape) > most and not mx.runtime.Features().is_enabled("INT64_TENSOR_SIZE"):
        count, on_gpu = ("2**31 - 1", "") if most == MOST else (most, " on a GPU")
        raise TooLargeError(
            f"a tensor of shape {shape} has more than {count} elements, which this MXNet cannot "
            f"count{on_gpu}; make the batch smaller"
        )
    return shape
