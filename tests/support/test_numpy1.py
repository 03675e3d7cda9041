"""MXNet's modules see NumPy 1.23 on every NumPy; everybody else sees the NumPy that is there.

On NumPy 1 much of this holds of itself. CI runs it with NumPy 2 too.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import memonger  # noqa: F401
import mxnet as mx
import numpy as np
import pytest
from memonger.support.numpy1 import LOST

from planned import run_code

pytestmark = pytest.mark.python_differs

#: A later NumPy lacks all of them but `bool`, which NumPy itself needs.
NAMES = {*LOST} - {"bool"}

IMPORTS = """
import numpy, warnings
for name in NAMES:
    vars(numpy).pop(name, None)
there = dict(vars(numpy))
printed = repr((numpy.float32(0.5), numpy.arange(3)[1:]))
import memonger.support.mxnet, mxnet as mx
assert not vars(numpy).keys() & NAMES, vars(numpy).keys() & NAMES
assert all(vars(numpy)[name] is value for name, value in there.items())
assert printed == repr((numpy.float32(0.5), numpy.arange(3)[1:]))
print(mx.np.PINF, mx.np.NINF, mx.np.NaN, mx.np.PZERO, mx.np.NZERO, mx.np.bool)
print(mx.np.product(mx.np.array([2, 3])), mx.np.sometrue(mx.np.array([0, 1])))
"""


def test_mxnet_alone_finds_what_numpy_has_lost() -> None:
    first, second = run_code(IMPORTS.replace("NAMES", repr(NAMES))).splitlines()
    assert first == "inf -inf nan 0.0 -0.0 <class 'bool'>"
    assert second == "6.0 True"


def called(name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a function of mx.np, for which MXNet calls NumPy's; what it computes, as a list."""
    arrays = [mx.np.array(arg) if isinstance(arg, list) else arg for arg in args]
    result = getattr(mx.np, name)(*arrays, **kwargs)
    return result.tolist() if hasattr(result, "tolist") else result


@pytest.mark.filterwarnings("error:numpy.core:DeprecationWarning")
def test_lost_functions_compute_what_they_did() -> None:
    assert called("alltrue", [1, 0]) is False and called("sometrue", [1, 0]) is True
    assert called("product", [2.0, 3.0]) == 6 and called("round_", [2.57], 1) == [
        pytest.approx(2.6)
    ]
    assert called("msort", [[3, 1], [2, 4]]) == [[2, 1], [3, 4]]
    assert called("trapz", [1, 2, 3]) == 4 and called("trapz", [1, 2, 3], dx=0.5) == 2
    assert called("in1d", [[1, 2], [3, 4]], [2, 3]) == [False, True, True, False]
    assert called("in1d", [1, 2], [2], invert=True) == [True, False]
    assert called("nanpercentile", [1, 2, 4], 50, interpolation="lower") == 2
    assert called("nanquantile", [1, 2, 4, 8], 0.5, interpolation="higher") == 4
    assert called("pad", [1, 2], (1, 0), mode="constant") == [0, 1, 2]
    with pytest.raises(ValueError, match="not in allowed keywords"):
        called("pad", [1, 2], (1, 0), mode="edge", constant_values=3)
    assert mx.nd.moveaxis(mx.nd.zeros((1, 2, 3)), 0, 2).shape == (2, 3, 1)
    with pytest.raises(RuntimeError, match="NEP 32"):
        mx.np.mirr([1, 2], 0.1, 0.1)


def test_numpy_integers_in_attributes_are_numbers(tmp_path: Path) -> None:
    shape, axes = tuple(np.array([2, 3])), tuple(np.array([1, 0]))
    pair: Any = [np.int64(1), {"a": np.float64(0.5)}]
    variable = mx.sym.Variable("data", shape=shape, lr_mult=np.float32(0.5), __pair__=pair)
    assert variable.attr("__shape__") == "(2, 3)" and variable.attr("__lr_mult__") == "0.5"
    assert mx.sym.transpose(variable, axes=axes).infer_shape()[1] == [(3, 2)]
    array = mx.nd.zeros(shape)
    assert array.transpose(axes).slice(begin=shape[:1], end=shape[1:]).shape == (1, 2)
    assert array.reshape(axes[:1] + (-1,)).shape == (1, 6)
    assert variable.attr("__pair__") == "[1, {'a': 0.5}]"
    (tmp_path / "data.csv").write_text("1,2,3\n4,5,6\n")
    batches = mx.io.CSVIter(
        data_csv=str(tmp_path / "data.csv"), data_shape=shape[1:], batch_size=np.int64(2)
    )
    assert next(batches).data[0].shape == (2, 3)


def test_text_is_text_to_mxnet_and_integers_wrap() -> None:
    """``str`` is a type of its own where attributes are written."""
    symbol = mx.sym.Variable("data") + 1
    assert symbol.optimize_for("no such backend").list_outputs() == symbol.list_outputs()
    with pytest.raises(AssertionError):
        symbol.optimize_for(3)
    for array in (mx.nd.array([1621, -1], dtype="uint8"), mx.np.array([1621, -1], dtype="uint8")):
        assert array.asnumpy().tolist() == [85, 255]


def test_numpy_compares_arrays_of_mxnet() -> None:
    """Since NumPy 1.24 it would say that they differ, or raise."""
    one, other = mx.nd.array([[1, 2]]), mx.nd.array([[1, 3]])
    assert np.array_equal(one, one) and not np.array_equal(one, other)
    assert np.all(one == one) and not np.all(one == other)
    np.testing.assert_array_equal(one, one)


def test_numpy_functions_of_arrays_of_mx_np_give_tuples_of_them() -> None:
    """They are named tuples since NumPy 1.25."""
    orthogonal, triangular = np.linalg.qr(mx.np.array([[2.0, 0.0], [0.0, 3.0]]))
    product = mx.np.dot(orthogonal, triangular)
    assert isinstance(product, mx.np.ndarray) and product.tolist() == [[2, 0], [0, 3]]


def test_metrics_add_in_float64() -> None:
    """0.0 + numpy.float32(1) is a float32 since NumPy 2, in which 2**24 + 1 is 2**24."""
    loss, perplexity = mx.metric.Loss(), mx.metric.Perplexity(ignore_label=None)
    loss.update(None, [mx.nd.array([2.0**24])])
    for _ in range(3):
        loss.update(None, [mx.nd.array([1.0])])
    assert loss.sum_metric == 2**24 + 3 and type(loss.get()[1]) is np.float64
    probable = mx.nd.array([[0.7, 0.3], [0.9, 0.1]])
    perplexity.update([mx.nd.array([0, 1])] * 2, [probable] * 2)
    (each,) = (-mx.nd.log(mx.nd.array([0.7])) - mx.nd.log(mx.nd.array([0.1]))).asnumpy().tolist()
    assert perplexity.sum_metric == 2 * each


@pytest.mark.parametrize("name", ["lars", "lbsgd"])
def test_rates_are_computed_in_float64(name: str) -> None:
    optimizer = mx.optimizer.create(name, learning_rate=0.1, wd=0.01, momentum=0.9)
    weight, gradient = mx.nd.array([0.3, 0.7]), mx.nd.array([0.01, 0.03])
    w, g = (float(optimizer._l2norm(x)) for x in (weight, gradient))
    if name == "lars":
        optimizer.idx2name = {0: "w"}
        rate = optimizer._get_lars(0, weight, gradient, 0.1, 0.01)
        assert rate == optimizer.eta * w / (g + 0.01 * w + optimizer.eps) * 0.1
    else:
        rate = optimizer._get_lars(weight, gradient, 0.01)
        assert rate == math.sqrt(w / (g + 0.01 * w + 1e-18))


def test_records_take_several_labels() -> None:
    header = mx.recordio.IRHeader(0, [1, 2, 3], 5, 0)
    back, content = mx.recordio.unpack(mx.recordio.pack(header, b"content"))
    assert back.label.tolist() == [1, 2, 3] and content == b"content"


#: As on Python 3.14, whose workers get their dataset pickled; a lambda cannot be.
WORKERS = """
import multiprocessing
multiprocessing.context._default_context._default_context = (
    multiprocessing.get_context("forkserver")
)
import memonger.support.mxnet, mxnet as mx
from mxnet.gluon.data import ArrayDataset, DataLoader
data = ArrayDataset([1.0, 2.0, 3.0]).transform(lambda x: 2 * x)
print([batch.asnumpy().tolist() for batch in DataLoader(data, batch_size=2, num_workers=1)])
print(multiprocessing.get_context().get_start_method())
"""


def test_workers_are_forked_unless_another_way_was_chosen() -> None:
    assert run_code(WORKERS) == "[[2.0, 4.0], [6.0]]\nforkserver\n"
