"""``Plan.device_bytes``: what MXNet asks a GPU for, in its own blocks.

That it is what the GPU build asks for is shown in ``gpu_dry_run/test_networks.py``.
"""

from __future__ import annotations

from typing import Any

import memonger
import mxnet as mx
import pytest
from memonger.costs.device import rounded

import networks

KB, MB = 2**10, 2**20
POOL = "MXNET_GPU_MEM_POOL_"
ASKED_AND_TAKEN: dict[str, Any] = {
    "default": (
        {},
        [(0, 0), (1, 4 * KB), (4 * KB, 4 * KB), (4 * KB + 1, 8 * KB)]
        + [(2 * MB, 2 * MB), (2 * MB + 1, 4 * MB), (5 * MB, 6 * MB)],
    ),
    "other sizes": (
        {POOL + "PAGE_SIZE": "1024", "MXNET_GPU_MEM_LARGE_ALLOC_ROUND_SIZE": "10240"},
        [(1, KB), (10 * KB, 10 * KB), (10 * KB + 1, 20 * KB)],
    ),
    "powers of two": (
        {POOL + "TYPE": "Round"},
        [(0, 0), (1, 4 * KB), (5 * KB, 8 * KB), (9 * MB, 16 * MB), (16 * MB, 16 * MB)]
        + [(16 * MB + 1, 32 * MB), (33 * MB, 48 * MB)],
    ),
    "powers of two up to a MB": (
        {POOL + "TYPE": "Round", POOL + "ROUND_LINEAR_CUTOFF": "20"},
        [(600 * KB, MB), (MB + 1, 2 * MB), (2 * MB + 1, 3 * MB)],
    ),
    "no pool": ({POOL + "TYPE": "Unpooled"}, [(0, 0), (1, 1), (3 * MB + 5, 3 * MB + 5)]),
}


@pytest.mark.parametrize("case", ASKED_AND_TAKEN)
def test_rounding(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    settings, pairs = ASKED_AND_TAKEN[case]
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    asked, taken = zip(*pairs)
    assert rounded(asked).tolist() == list(taken)


def test_arrays_of_a_chain() -> None:
    """Results of 275 pages; weights of 4.6 MB take 6 MB, biases of 4400 bytes two pages."""
    symbol, shapes = networks.chain(depth=12, hidden=1100, batch=256)
    result, layer = 275 * 4 * KB, 6 * MB + 8 * KB
    assert result == 256 * 1100 * 4
    plan = memonger.plan(symbol, shapes)
    assert plan.recomputed and plan.pool_bytes % result == 0
    inputs = 2 * result
    assert plan.device_bytes == plan.pool_bytes + 2 * (12 * layer + inputs)
    request = {n: "null" if n in shapes else "write" for n in symbol.list_arguments()}
    plan = memonger.plan(symbol, shapes, grad_req=request)
    assert plan.device_bytes == plan.pool_bytes + 2 * 12 * layer + inputs


def test_auxiliary_states_and_gradients_of_outputs() -> None:
    """A loss reads no gradient of its output; any other output takes one more array."""
    x = mx.sym.BatchNorm(mx.sym.Variable("data"))
    outputs = (x, mx.sym.MakeLoss(x), mx.sym.Group([mx.sym.MakeLoss(x), mx.sym.BlockGrad(x)]))
    without_pool = []
    for net in outputs:
        plan = memonger.plan(net, data=(256, 1024))
        pool = plan.pool_bytes
        without_pool.append(plan.device_bytes - pool)
    arrays = 2 * MB + 4 * 4 * KB + 2 * 4 * KB  # data, gamma, beta; moving mean and variance
    assert without_pool == [arrays + MB, arrays, arrays]
