"""Operations of a forward pass: by hand, against what MXNet computes, and as published."""

from __future__ import annotations

from typing import Any, Sequence, Tuple

import mxnet as mx
import networks
import pytest
from memonger.costs.time.flops import _FORMULAS, flops, forward_flops
from operator_cases import CASES, SMALL_SHAPES, small_net
from planned import forward

Shapes = Sequence[Tuple[int, ...]]

# -- by hand ----------------------------------------------------------------------------------

IMAGES = (2, 8, 6, 6)  # 576 elements
MATRIX = (4, 10)

# operator, attributes, shapes in, shapes out, operations
BY_HAND = [
    # 2 * 16 * 4 * 4 outputs of 8 * 3 * 3 multiply-adds, and a bias
    (
        "Convolution",
        "num_filter=16 kernel=(3,3)",
        [IMAGES, (16, 8, 3, 3), (16,)],
        [(2, 16, 4, 4)],
        512 * (2 * 72 + 1),
    ),
    # the same without bias, in two groups, the channels last
    (
        "Convolution",
        "num_filter=16 kernel=(3,3) num_group=2 layout=NHWC no_bias=True",
        [(2, 6, 6, 8), (16, 3, 3, 4)],
        [(2, 4, 4, 16)],
        512 * 2 * 36,
    ),
    # dilated: fewer outputs, no more products in each
    (
        "Convolution",
        "num_filter=16 kernel=(3,3) dilate=(2,2)",
        [IMAGES, (16, 8, 3, 3), (16,)],
        [(2, 16, 2, 2)],
        128 * (2 * 72 + 1),
    ),
    # 576 elements, each to 4 filters of 3 * 3 in its group; a bias for 2 * 8 * 8 * 8 outputs
    (
        "Deconvolution",
        "num_filter=8 kernel=(3,3) num_group=2 no_bias=False",
        [IMAGES, (8, 4, 3, 3), (8,)],
        [(2, 8, 8, 8)],
        576 * 2 * 36 + 1024,
    ),
    # a convolution whose 2 * 8 * 9 * 16 values are interpolated, 8 operations each
    (
        "_contrib_DeformableConvolution",
        "num_filter=16 kernel=(3,3)",
        [IMAGES, (2, 18, 4, 4), (16, 8, 3, 3), (16,)],
        [(2, 16, 4, 4)],
        512 * 145 + 2304 * 8,
    ),
    (
        "_contrib_ModulatedDeformableConvolution",
        "num_filter=16 kernel=(3,3)",
        [IMAGES, (2, 18, 4, 4), (2, 9, 4, 4), (16, 8, 3, 3), (16,)],
        [(2, 16, 4, 4)],
        512 * 145 + 2304 * 9,
    ),
    (
        "FullyConnected",
        "num_hidden=5",
        [IMAGES, (5, 288), (5,)],
        [(2, 5)],
        10 * (2 * 288 + 1),
    ),
    (
        "FullyConnected",
        "num_hidden=5 flatten=False no_bias=True",
        [IMAGES, (5, 6)],
        [(2, 8, 6, 5)],
        480 * 2 * 6,
    ),
    ("dot", "", [(4, 10), (10, 3)], [(4, 3)], 12 * 2 * 10),
    ("dot", "transpose_a=True", [(10, 4), (10, 3)], [(4, 3)], 12 * 2 * 10),
    ("dot", "", [(10,), (10,)], [(1,)], 20),
    ("dot", "", [(2, 4, 10), (10, 3)], [(2, 4, 3)], 24 * 2 * 10),
    ("batch_dot", "", [(7, 4, 10), (7, 10, 3)], [(7, 4, 3)], 7 * 12 * 2 * 10),
    ("batch_dot", "transpose_a=1", [(7, 10, 4), (7, 10, 3)], [(7, 4, 3)], 7 * 12 * 2 * 10),
    ("batch_dot", "transpose_b=1", [(7, 4, 10), (7, 3, 10)], [(7, 4, 3)], 7 * 12 * 2 * 10),
    ("_linalg_gemm2", "", [(7, 4, 10), (7, 10, 3)], [(7, 4, 3)], 7 * 12 * 2 * 10),
    (
        "_linalg_gemm2",
        "transpose_a=True axis=0",
        [(10, 7, 4), (10, 7, 3)],
        [(4, 7, 3)],
        7 * 12 * 2 * 10,
    ),
    (
        "_linalg_gemm",
        "",
        [(7, 4, 10), (7, 10, 3), (7, 4, 3)],
        [(7, 4, 3)],
        7 * 12 * (2 * 10 + 1),
    ),
    # 10 of the 16 products of rows with rows
    ("_linalg_syrk", "", [(7, 4, 10)], [(7, 4, 4)], 7 * 10 * 2 * 10),
    ("_linalg_syrk", "transpose=True", [(7, 10, 4)], [(7, 4, 4)], 7 * 10 * 2 * 10),
    # each of 3 columns: 10 multiplications, 6 additions
    ("_linalg_trmm", "", [(7, 4, 4), (7, 4, 3)], [(7, 4, 3)], 7 * 3 * 16),
    ("_linalg_trsm", "", [(7, 4, 4), (7, 4, 3)], [(7, 4, 3)], 7 * 3 * 16),
    # 4 gates of 6 units: 36 inputs and 6 states, then 21; the second layer reads 6; 32 rows
    (
        "RNN",
        "mode=lstm state_size=6 num_layers=2",
        [(4, 8, 36), (1344,), (2, 8, 6), (2, 8, 6)],
        [(4, 8, 6)],
        32 * 6 * (2 * 4 * (36 + 6) + 21 + 2 * 4 * (6 + 6) + 21),
    ),
    # both directions, whose 12 outputs the second layer reads
    (
        "RNN",
        "mode=gru state_size=6 num_layers=2 bidirectional=True",
        [(4, 8, 36), (2304,), (4, 8, 6)],
        [(4, 8, 12)],
        2 * 32 * 6 * (2 * 3 * (36 + 6) + 17 + 2 * 3 * (12 + 6) + 17),
    ),
    (
        "RNN",
        "mode=rnn_tanh state_size=6 num_layers=1",
        [(4, 8, 36), (264,), (1, 8, 6)],
        [(4, 8, 6)],
        32 * 6 * (2 * (36 + 6) + 4),
    ),
    # 6 units projected to 2: the gates read 2, and 6 * 2 products make them
    (
        "RNN",
        "mode=lstm state_size=6 num_layers=1 projection_size=2",
        [(4, 8, 36), (972,), (1, 8, 2), (1, 8, 6)],
        [(4, 8, 2)],
        32 * (6 * (2 * 4 * (36 + 2) + 21) + 2 * 6 * 2),
    ),
    # 5 steps, batch 2, 3 heads of 4
    (
        "_contrib_interleaved_matmul_selfatt_qk",
        "heads=3",
        [(5, 2, 36)],
        [(6, 5, 5)],
        6 * 5 * 5 * 2 * 4,
    ),
    (
        "_contrib_interleaved_matmul_selfatt_valatt",
        "heads=3",
        [(5, 2, 36), (6, 5, 5)],
        [(5, 2, 12)],
        6 * 5 * 4 * 2 * 5,
    ),
    # 7 queries of 5 keys
    (
        "_contrib_interleaved_matmul_encdec_qk",
        "heads=3",
        [(7, 2, 12), (5, 2, 24)],
        [(6, 7, 5)],
        6 * 7 * 5 * 2 * 4,
    ),
    (
        "_contrib_interleaved_matmul_encdec_valatt",
        "heads=3",
        [(5, 2, 24), (6, 7, 5)],
        [(7, 2, 12)],
        6 * 7 * 4 * 2 * 5,
    ),
    # 9 displacements of 6 * 6 pixels: windows of 3 * 3 pixels of 8 channels
    (
        "Correlation",
        "kernel_size=3 max_displacement=1 pad_size=2",
        [IMAGES, IMAGES],
        [(2, 9, 6, 6)],
        648 * (2 * 72 + 1),
    ),
    (
        "Correlation",
        "max_displacement=1 pad_size=1 is_multiply=False",
        [IMAGES, IMAGES],
        [(2, 9, 6, 6)],
        648 * (3 * 8 + 1),
    ),
    ("Pooling", "kernel=(2,3)", [IMAGES], [(2, 8, 5, 4)], 320 * 6),
    ("Pooling", "global_pool=True", [IMAGES], [(2, 8, 1, 1)], 576),
    ("_contrib_AdaptiveAvgPooling2D", "output_size=(2,2)", [IMAGES], [(2, 8, 2, 2)], 576),
    ("UpSampling", "scale=2 sample_type=nearest", [IMAGES], [(2, 8, 12, 12)], 0),
    (
        "UpSampling",
        "scale=2 sample_type=bilinear num_filter=8",
        [IMAGES, (8, 1, 4, 4)],
        [(2, 8, 12, 12)],
        576 * 2 * 16,
    ),
    ("_contrib_BilinearResize2D", "", [IMAGES], [(2, 8, 9, 9)], 1296 * 8),
    ("BilinearSampler", "", [IMAGES, (2, 2, 5, 5)], [(2, 8, 5, 5)], 400 * 8),
    ("BatchNorm", "", [IMAGES, (8,), (8,), (8,), (8,)], [IMAGES], 576 * 7),
    ("BatchNorm", "use_global_stats=True", [IMAGES] + [(8,)] * 4, [IMAGES], 576 * 3),
    ("_contrib_SyncBatchNorm", "", [IMAGES, (8,), (8,), (8,), (8,)], [IMAGES], 576 * 7),
    ("_contrib_BatchNormWithReLU", "", [IMAGES] + [(8,)] * 4, [IMAGES], 576 * 8),
    ("LayerNorm", "", [MATRIX, (10,), (10,)], [MATRIX], 40 * 8),
    ("InstanceNorm", "", [IMAGES, (8,), (8,)], [IMAGES], 576 * 7),
    ("GroupNorm", "num_groups=2", [IMAGES, (2,), (2,)], [IMAGES], 576 * 7),
    ("L2Normalization", "", [MATRIX], [MATRIX], 40 * 3),
    ("LRN", "nsize=5", [IMAGES], [IMAGES], 576 * 10),
    ("moments", "axes=(0,)", [MATRIX], [(10,), (10,)], 40 * 4),
    ("norm", "axis=1", [MATRIX], [(4,)], 40 * 2),
    ("softmax", "", [MATRIX], [MATRIX], 40 * 5),
    ("log_softmax", "", [MATRIX], [MATRIX], 40 * 5),
    ("softmin", "", [MATRIX], [MATRIX], 40 * 6),
    ("SoftmaxOutput", "", [MATRIX, (4,)], [MATRIX], 40 * 5),
    ("softmax_cross_entropy", "", [MATRIX, (4,)], [(1,)], 40 * 5),
    ("sum", "axis=1", [MATRIX], [(4,)], 40),
    ("mean", "", [MATRIX], [(1,)], 40),
    ("add_n", "num_args=3", [MATRIX, MATRIX, MATRIX], [MATRIX], 40 * 2),
    ("elemwise_add", "", [MATRIX, MATRIX], [MATRIX], 40),
    ("broadcast_mul", "", [MATRIX, (1, 10)], [MATRIX], 40),
    ("Activation", "act_type=tanh", [MATRIX], [MATRIX], 40),
    ("Dropout", "p=0.5", [MATRIX], [MATRIX], 40),
    ("Embedding", "input_dim=99 output_dim=10", [(4,), (99, 10)], [(4, 10)], 0),
    ("take", "", [(99, 10), (4,)], [(4, 10)], 0),
    ("Reshape", "shape=(-1,)", [MATRIX], [(40,)], 0),
    ("transpose", "", [MATRIX], [(10, 4)], 0),
    ("Concat", "dim=0", [MATRIX, MATRIX], [(8, 10)], 0),
    ("SliceChannel", "num_outputs=2", [MATRIX], [(4, 5), (4, 5)], 0),
    ("_copy", "", [MATRIX], [MATRIX], 0),
    ("BlockGrad", "", [MATRIX], [MATRIX], 0),
]


@pytest.mark.parametrize(
    "op, attrs, inputs, outputs, expected",
    BY_HAND,
    ids=[f"{row[0]} {row[1]}" for row in BY_HAND],
)
def test_formulas(op: str, attrs: str, inputs: Shapes, outputs: Shapes, expected: int) -> None:
    found = flops(op, dict(a.split("=") for a in attrs.split()), inputs, outputs)
    assert type(found) is int
    assert found == expected


def test_the_tables_name_operators_that_exist() -> None:
    assert sorted(op for op in _FORMULAS if not _exists(op)) == []


def _exists(op: str) -> bool:
    handle = mx.base.OpHandle()
    return mx.base._LIB.NNGetOpHandle(op.encode(), mx.base.ctypes.byref(handle)) == 0


# -- against what MXNet computes --------------------------------------------------------------

# A product of ones is the number of its summands.
S, V = mx.sym, mx.sym.Variable
PRODUCTS: dict[str, tuple[Any, dict[str, tuple[int, ...]]]] = {
    "convolution": (
        S.Convolution(V("a"), kernel=(3, 2), num_filter=6, stride=(2, 1), no_bias=True),
        {"a": (2, 4, 9, 7)},
    ),
    "groups": (
        S.Convolution(
            V("a"), kernel=(3, 3), num_filter=6, num_group=2, dilate=(2, 1), no_bias=True
        ),
        {"a": (2, 4, 9, 7)},
    ),
    "volumes": (
        S.Convolution(V("a"), kernel=(2, 3, 2), num_filter=3, no_bias=True),
        {"a": (2, 2, 4, 5, 6)},
    ),
    "deconvolution": (
        S.Deconvolution(V("a"), kernel=(3, 2), num_filter=6, num_group=2, stride=(2, 1)),
        {"a": (2, 4, 5, 7)},
    ),
    "fully connected": (
        S.FullyConnected(V("a"), num_hidden=5, no_bias=True),
        {"a": (3, 4, 5)},
    ),
    "last axis": (
        S.FullyConnected(V("a"), num_hidden=5, no_bias=True, flatten=False),
        {"a": (3, 4, 5)},
    ),
    "dot": (S.dot(V("a"), V("b")), {"a": (2, 3, 4), "b": (4, 5)}),
    "dot, both transposed": (
        S.dot(V("a"), V("b"), transpose_a=True, transpose_b=True),
        {"a": (4, 3), "b": (5, 4)},
    ),
    "batch_dot": (S.batch_dot(V("a"), V("b")), {"a": (2, 3, 4), "b": (2, 4, 5)}),
    "batch_dot, first transposed": (
        S.batch_dot(V("a"), V("b"), transpose_a=True),
        {"a": (2, 4, 3), "b": (2, 4, 5)},
    ),
    "gemm2": (
        S.linalg_gemm2(V("a"), V("b"), transpose_b=True),
        {"a": (2, 3, 4), "b": (2, 5, 4)},
    ),
    "gemm2 of another axis": (
        S.linalg_gemm2(V("a"), V("b"), transpose_a=True, axis=0),
        {"a": (4, 2, 3), "b": (4, 2, 5)},
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_of_ones(name: str) -> None:
    symbol, shapes = PRODUCTS[name]
    executor = symbol.simple_bind(mx.cpu(), **shapes)
    for array in executor.arg_arrays:
        array[:] = 1
    summands = executor.forward()[0].asnumpy().sum()
    assert forward_flops(forward(symbol, shapes)).sum() == 2 * summands


@pytest.mark.parametrize("name", CASES)
def test_every_operator_has_a_count(name: str) -> None:
    symbol = small_net(CASES[name])
    counts = forward_flops(forward(symbol, SMALL_SHAPES))
    assert (counts >= 0).all()
    assert counts.sum() > 4 * 10 * 288 * 2  # its first node, a FullyConnected


# -- as published -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, image, published",
    [
        # torchvision's documentation of the same networks (its ResNet-50 strides where the zoo's
        # v2 does), in 1e9 multiply-adds of convolutions and fully connected layers.
        ("resnet50_v2", 224, 4.09),
        ("vgg16", 224, 15.47),
        ("vgg19", 224, 19.63),
        ("alexnet", 224, 0.71),
        ("densenet121", 224, 2.83),
        ("inceptionv3", 299, 5.71),
        # He et al. 2015 (arXiv 1512.03385), Table 1.
        ("resnet50_v1", 224, 3.8),
        ("resnet152_v1", 224, 11.3),
    ],
)
def test_networks(name: str, image: int, published: float) -> None:
    symbol, shapes = networks.model_zoo(name, batch=2, image=image)
    graph = forward(symbol, shapes)
    counts = forward_flops(graph)
    products = [i for i, n in enumerate(graph.nodes) if n.op in ("Convolution", "FullyConnected")]
    assert counts[products].sum() / 2 / 2e9 == pytest.approx(published, rel=0.02)
    assert counts[products].sum() < counts.sum() < 1.1 * counts[products].sum()


# -- the share of a plan ----------------------------------------------------------------------
