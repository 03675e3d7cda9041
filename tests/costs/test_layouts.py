"""Marks leave every tensor in the layout that MKLDNN gives it without a plan."""

from __future__ import annotations

import functools
import math
import re
from typing import Any

import memonger
import mxnet as mx
import numpy as np
import pytest
from memonger.costs.layouts import PLAIN, find_layouts
from memonger.graph.operators.layouts import count_reordered
from memonger.graph.operators.tensors import Tensor
from memonger.support.cache import forget
from memonger.support.kernels import compiled, constant
from memonger.graph.training import training_graph
from networks.mixed import KINDS
from planned import forward, is_trainable, run_code
from zoo import drawn

S = mx.sym
BLOCKS = constant("BLOCKS")
WAYS: dict[str, dict[str, Any]] = {
    "default": {},
    "chen2016": {"planner": "chen2016"},
    "cpu": {"ctx": mx.cpu()},
    "budget": {"budget": "70%"},
}
#: Drawn networks in which MXNet itself dies on the CPU, with no plan: slices of blocks.
DIE = (10, 11, 18)


def same_bits(symbol: Any, shapes: Any, **options: Any) -> Any:
    """Return the plan, which trains to the same bits; or None where none keeps the budget."""
    try:
        plan = memonger.plan(symbol, shapes, patience=0.02, **{"how": "marks", **options})
    except memonger.BudgetError:
        return None
    report = memonger.check(symbol, plan.symbol, shapes, 2)
    assert report, f"{options}: {report}"
    return plan


@pytest.mark.parametrize(
    "seeds, least",
    [
        (range(5), 12),
        pytest.param(range(5, 15), 16, marks=pytest.mark.slow),
        pytest.param(range(15, 60), 120, marks=pytest.mark.exhaustive),
    ],
)
def test_drawn_networks_keep_their_bits_in_all_ways(seeds: Any, least: int) -> None:
    planned = 0
    for seed in seeds:
        symbol, shapes = drawn(seed)
        if seed in DIE or not is_trainable(symbol, shapes):
            continue
        for options in WAYS.values():
            plan = same_bits(symbol, shapes, **options)
            planned += plan is not None and plan.pool_bytes < plan.unplanned_bytes
    assert planned > least


@pytest.mark.parametrize("name", sorted(KINDS))
def test_kinds_that_people_train(name: str) -> None:
    symbol, shapes = KINDS[name]()
    plan = same_bits(symbol, shapes)
    assert plan.pool_bytes < 0.7 * plan.unplanned_bytes


def test_no_layouts_without_mkldnn(monkeypatch: pytest.MonkeyPatch) -> None:
    symbol, shapes = KINDS["SE-ResNet"]()
    followed = memonger.plan(symbol, shapes, patience=0.02, ctx=mx.cpu(), how="marks").pool_bytes
    monkeypatch.setenv("MXNET_MKLDNN_ENABLED", "0")
    forget()
    assert (
        memonger.plan(symbol, shapes, patience=0.02, ctx=mx.cpu(), how="marks").pool_bytes
        < followed
    )


def test_the_remedies_are_named_where_nothing_is_left(caplog: pytest.LogCaptureFixture) -> None:
    """One gate, and its input must be held for what it makes to be plain."""
    x = S.Convolution(S.var("data"), num_filter=16, kernel=(3, 3), pad=(1, 1))
    x = S.broadcast_mul(x, S.Pooling(x, global_pool=True, kernel=(1, 1), pool_type="avg"))
    x = S.Flatten(S.BatchNorm(x, fix_gamma=False))
    plan = same_bits(S.SoftmaxOutput(x, name="softmax"), {"data": (2, 3, 8, 8)})
    assert plan.pool_bytes > 0.95 * plan.unplanned_bytes
    for remedy in ("how='schedule'", "ctx='gpu'", "MXNET_MKLDNN_ENABLED=0"):
        assert remedy in caplog.text


# ---------------------------------------------------------------- how convolutions lay out

#: Trains each of the convolutions that are tried, between softmaxes: (forward, backward) pairs.
CONVOLUTIONS = """
import memonger, mxnet as mx
for mb, ic, oc, size, kernel, stride, pad, groups in tried:
    x, w = mx.nd.ones((mb, ic, size, size)), mx.nd.ones((oc, ic // groups, kernel, kernel))
    x.attach_grad(), w.attach_grad()
    with mx.autograd.record():
        y = mx.nd.Convolution(x, w, kernel=(kernel, kernel), stride=(stride, stride),
                              pad=(pad, pad), num_filter=oc, num_group=groups, no_bias=True)
    mx.nd.waitall()
    mx.nd.softmax(mx.nd.ones((7, 7))).wait_to_read()
    y.backward()
    mx.nd.waitall()
    mx.nd.softmax(mx.nd.ones((7, 7))).wait_to_read()
"""


def convolutions(count: int) -> list[Any]:
    """Draw batch, channels in and out, size, kernel, stride, padding and groups."""
    random = np.random.RandomState(0)
    drawn: set[Any] = set()

    def one_of(*choices: int) -> int:
        return int(random.choice(choices))

    while len(drawn) < count:
        ic, oc = (one_of(1, 3, 5, 8, 12, 16, 20, 32, 48, 64, 96, 128) for _ in range(2))
        groups = 1
        if random.randint(4) == 0:
            oc = groups = ic
        kernel, size = one_of(1, 1, 3, 3, 5, 7, 9), one_of(1, 4, 7, 9, 14, 28)
        stride, pad = one_of(1, 2, 3), one_of(0, kernel // 2, kernel // 2, kernel - 1)
        if size + 2 * pad >= kernel:
            drawn.add((one_of(1, 2, 3), ic, oc, size, kernel, stride, pad, groups))
    return sorted(drawn)


def predicted(conv: Any) -> int:
    mb, ic, oc, size, kernel, stride, pad, groups = conv
    size_of = {"kernel": (kernel,) * 2, "stride": (stride,) * 2, "pad": (pad,) * 2}
    x = S.Convolution(S.var("data"), num_filter=oc, num_group=groups, no_bias=True, **size_of)
    training = training_graph(forward(x, {"data": (mb, ic, size, size)}))
    t, nothing = training.arrays, np.zeros(training.arrays.forward_nodes, dtype=np.bool_)
    step = compiled.find_step(t, nothing)
    layouts = compiled.follow_layouts(t, find_layouts(training), step)[0]
    return int(layouts[t.output_start[training.ops.index("Convolution")]])


@functools.lru_cache(maxsize=None)
def log_of(isa: str, count: int = 150) -> list[str]:
    """Train drawn convolutions elsewhere; what MKLDNN logs of each pass, forward and backward."""
    code = f"tried = {convolutions(count)}" + CONVOLUTIONS
    printed = run_code(code, DNNL_VERBOSE="1", DNNL_MAX_CPU_ISA=isa)
    passes = re.split(r".*exec,.*,softmax,.*", printed)
    assert len(passes) == 2 * count + 1
    return passes


ISAS = ("AVX2", pytest.param("ALL", marks=pytest.mark.late))


@pytest.mark.parametrize("isa", ISAS)
def test_convolutions_lay_out_as_predicted(isa: str) -> None:
    """What is said to be plain is plain, and what is said to be in the usual blocks is in them."""
    line_of_log = r"exec.*,convolution,.*forward_training.* dst_f32::blocked:(\w+)"
    seen = [re.findall(line_of_log, log)[0] for log in log_of(isa)[:-1:2]]
    layouts = [predicted(conv) for conv in convolutions(150)]
    blocks = "aBcd8b" if isa == "AVX2" else "aBcd(8|16)b"
    assert all(layout == "abcd" for layout, said in zip(seen, layouts) if said == PLAIN)
    assert all(
        re.fullmatch(blocks, layout) for layout, said in zip(seen, layouts) if said == BLOCKS
    )
    assert layouts.count(PLAIN) > 30 and layouts.count(BLOCKS) > 15


def test_gradients_of_convolutions_copy_what_is_counted() -> None:
    """With AVX2 as with AVX512, but for one channel, and for groups of one with windows of one."""
    counted = []
    for conv, log in zip(convolutions(150), log_of("AVX2")[1::2]):
        mb, ic, oc, size, kernel, stride, pad, groups = conv
        out = (size + 2 * pad - kernel) // stride + 1
        shapes = (mb, oc, out, out), (mb, ic, size, size), (oc, ic // groups, kernel, kernel)
        attrs = {"num_group": str(groups)}
        for name, width in (("kernel", kernel), ("stride", stride), ("pad", pad)):
            attrs[name] = f"({width}, {width})"
        tensors = [Tensor(shape, "float32") for shape in shapes]
        copies = re.findall(r"exec,cpu,reorder,.*,([\dx]+),[^,]*\n", log)
        seen = sum(4 * math.prod(map(int, dims.split("x"))) for dims in copies)
        asked = "_backward_Convolution", attrs, tensors, [True] * 3, True
        nbytes = count_reordered(*asked)
        assert nbytes in (0, seen) or kernel == 1 < groups, conv
        counted.append(nbytes > 0 or seen == 0)
    assert counted.count(True) > 100


@pytest.mark.parametrize("wants_data", [False, True])
@pytest.mark.parametrize(
    ("channels", "filters", "size", "copied"),
    [(16, 8, 32, (1, 1)), (64, 3, 16, (0, 1)), (64, 32, 8, (1, 1)), (21, 21, 8, (0, 0))],
)
def test_gradients_of_deconvolutions_copy_what_was_seen(
    channels: int, filters: int, size: int, copied: tuple[int, int], wants_data: bool
) -> None:
    """Copies of the gradient, and of data, for a library before MXNet's (``TmpMemMgr::Alloc``)."""
    attrs = {"kernel": "(4, 4)", "stride": "(2, 2)", "pad": "(1, 1)"}
    shapes = (2, filters, 2 * size, 2 * size), (2, channels, size, size), (channels, filters, 4, 4)
    gradient, data, weight = tensors = [Tensor(shape, "float32") for shape in shapes]
    seen = copied[0] * gradient.nbytes + copied[1] * data.nbytes
    seen += weight.nbytes * (1 + wants_data) * copied[1]
    op = "_backward_Deconvolution"
    assert count_reordered(op, attrs, tensors, [True] * 3, wants_data) == seen
    assert count_reordered(op, {**attrs, "num_group": "2"}, tensors, [True] * 3, wants_data) == 0
