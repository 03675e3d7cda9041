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


def check_elements(shape: Shape) -> Shape:
    """Return a shape; raise TooLargeError if it has more elements than MXNet can count."""
    if math.prod(shape) >= 2**31 and not mx.runtime.Features().is_enabled("INT64_TENSOR_SIZE"):
        raise TooLargeError(
            f"a tensor of shape {shape} has more than 2**31 - 1 elements, which this MXNet cannot "
            "count; make the batch smaller"
        )
    return shape
