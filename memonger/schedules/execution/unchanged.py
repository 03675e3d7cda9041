"""See that arrays are the same in a backward pass as in its forward pass.

A plan computes results again from parameters. If a script changes one between the two passes, the
gradients are not those of MXNet, whose backward pass reads the old results. MXNet's engine counts
what is written to an array (``Var::version`` in ``include/mxnet/engine.h``), but its C API does not
return the count, in which a new layout of MKLDNN is a change too. So values are compared, by a
*digest*: the product of each row with random numbers. That reads an array once, at the speed of
memory. It misses a change of a few elements in their last digits.

A script that changes parameters there does so from its first step on. So only the first passes of a
network are compared, and training takes no longer. The environment variable ``MEMONGER_WATCH`` is
their number: 0 compares none.
"""

from __future__ import annotations

import functools
import os
from typing import Mapping

import numpy as np

from memonger.support.errors import MemongerError
from memonger.support.mxnet import may_wait, mx
from memonger.support.types import Context, NDArray

WATCH = "MEMONGER_WATCH"  # environment variable

#: The share of the largest product of an array by which its products may differ unchanged: other
#: numbers of threads may round otherwise. A step of an optimizer changes more.
ROUNDING = 1e-6


def watched_passes() -> int:
    """Return how many backward passes of a network that is bound now are compared."""
    text = os.environ.get(WATCH, "10")
    if not text.isdecimal():
        raise MemongerError(f"{WATCH} is {text!r}; give a number of backward passes, such as 10")
    return int(text)


def digest(arrays: Mapping[str, NDArray]) -> dict[str, NDArray]:
    """Return the digest of each array of floats, (rows,), before it is computed."""
    products = {}
    with mx.autograd.pause(train_mode=True):
        for name, array in arrays.items():
            if np.dtype(array.dtype).kind != "f" or not array.size:
                continue
            # Without a GPU, MXNet has no products of float16.
            if array.dtype == np.float16 and array.context.device_type != "gpu":
                array = array.astype("float32")
            if len(array.shape) > 1:
                vector = _vector(array.size // array.shape[0], array.dtype, array.context)
                array = mx.nd.FullyConnected(array, vector, num_hidden=1, no_bias=True)
            products[name] = array.reshape((-1,)).copy()
    return products


def check_unchanged(before: Mapping[str, NDArray], after: Mapping[str, NDArray]) -> None:
    """Raise MemongerError if arrays have changed between two digests; wait for these."""
    if not may_wait():
        return
    changed = []
    for name, other in after.items():
        one, two = before[name].asnumpy(), other.asnumpy()
        with np.errstate(invalid="ignore"):  # the difference of infinities
            close = np.abs(one - two) <= ROUNDING * np.abs(one).max()
        if not (close | (one == two) | (np.isnan(one) & np.isnan(two))).all():
            changed.append(name)
    if changed:
        more = f" and {len(changed) - 1} others were" if len(changed) > 1 else " was"
        raise MemongerError(
            f"{changed[0]!r}{more} changed between a forward pass and its backward pass, which "
            "computes results again from it; change parameters after backward(), or train without "
            "a plan"
        )


@functools.lru_cache(maxsize=None)
def _vector(length: int, dtype: type[np.generic], ctx: Context) -> NDArray:
    """Return numbers of about the same size, (1, length), without a draw of MXNet's generators."""
    random = np.random.RandomState(length)
    numbers = random.choice([-1, 1], (1, length)) * random.uniform(1, 2, (1, length))
    return mx.nd.array(numbers, ctx, dtype)
