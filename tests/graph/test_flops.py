"""Operations of a forward pass: by hand, against what MXNet computes, and as published."""

from __future__ import annotations

from typing import Any

import mxnet as mx
import networks
import pytest
from operator_cases import CASES, SMALL_SHAPES, small_net
from planned import forward

S, C, L = mx.sym, mx.sym.contrib, mx.sym.linalg
a, b, c = (S.Variable(name) for name in "abc")
IMAGES, MATRIX = (2, 8, 6, 6), (4, 10)  # 576 and 40 elements
ROWS: Any = [(4, 8, 36)]
SHIFTS: Any = [IMAGES, (2, 18, 4, 4), (2, 9, 4, 4)]


def rnn(mode: str, num_layers: int = 1, **more: Any) -> Any:
    return S.RNN(a, mode=mode, num_layers=num_layers, state_size=6, **more)


def of_np(function: str, *first: str, **options: Any) -> Any:
    """Return what a function of ``mx.np`` makes of a and b."""
    product = getattr(S.np, function)
    return product(*first, a.as_np_ndarray(), b.as_np_ndarray(), **options).as_nd_ndarray()


THREE, FOUR = {"kernel": (3, 3)}, {"num_filter": 16, "kernel": (3, 3)}
FAR = {"max_displacement": 1}

#: A symbol, the shapes of a, b and c, operations.
BY_HAND: list[tuple[Any, list[tuple[int, ...]], int]] = [
    # 2 * 16 * 4 * 4 outputs of 8 * 3 * 3 multiply-adds, and a bias
    (S.Convolution(a, **FOUR), [IMAGES], 512 * (2 * 72 + 1)),
    # the same without bias, in two groups, the channels last
    (S.Convolution(a, num_group=2, layout="NHWC", no_bias=True, **FOUR), [(2, 6, 6, 8)], 512 * 72),
    # 576 elements, each to 4 filters of 3 * 3 in its group; a bias for 2 * 8 * 8 * 8 outputs
    (S.Deconvolution(a, num_filter=8, num_group=2, no_bias=False, **THREE), [IMAGES], 42496),
    (C.DeformableConvolution(a, b, **FOUR), SHIFTS[:2], 512 * 145),
    (C.ModulatedDeformableConvolution(a, b, c, **FOUR), SHIFTS, 512 * 145),
    (S.FullyConnected(a, num_hidden=5), [IMAGES], 10 * (2 * 288 + 1)),
    (L.gemm(a, b, c), [(7, 4, 10), (7, 10, 3), (7, 4, 3)], 7 * 12 * (2 * 10 + 1)),
    # 10 of the 16 products of rows with rows
    (L.syrk(a), [(7, 4, 10)], 7 * 10 * 2 * 10),
    (L.syrk(a, transpose=True), [(7, 10, 4)], 7 * 10 * 2 * 10),
    # each of 3 columns: 10 multiplications, 6 additions
    (L.trmm(a, b), [(7, 4, 4), (7, 4, 3)], 7 * 3 * 16),
    (L.trsm(a, b), [(7, 4, 4), (7, 4, 3)], 7 * 3 * 16),
    # 4 gates of 6 units: 36 inputs and 6 states, then 21; the second layer reads 6; 32 rows
    (rnn("lstm", 2), ROWS, 192 * (8 * (36 + 6) + 21 + 8 * (6 + 6) + 21)),
    # both directions, whose 12 outputs the second layer reads
    (rnn("gru", 2, bidirectional=True), ROWS, 2 * 192 * (6 * (36 + 6) + 17 + 6 * (12 + 6) + 17)),
    (rnn("rnn_tanh"), ROWS, 192 * (2 * (36 + 6) + 4)),
    # 6 units projected to 2: the gates read 2, and 6 * 2 products make them
    (rnn("lstm", projection_size=2), ROWS, 192 * (8 * (36 + 2) + 21) + 32 * 2 * 6 * 2),
    # 5 steps, batch 2, 3 heads of 4; then 7 queries of 5 keys
    (C.interleaved_matmul_selfatt_qk(a, heads=3), [(5, 2, 36)], 30 * 5 * 2 * 4),
    (C.interleaved_matmul_selfatt_valatt(a, b, heads=3), [(5, 2, 36), (6, 5, 5)], 30 * 4 * 2 * 5),
    (C.interleaved_matmul_encdec_qk(a, b, heads=3), [(7, 2, 12), (5, 2, 24)], 6 * 7 * 5 * 2 * 4),
    (C.interleaved_matmul_encdec_valatt(a, b, heads=3), [(5, 2, 24), (6, 7, 5)], 6 * 7 * 4 * 2 * 5),
    # 9 displacements of 6 * 6 pixels: windows of 3 * 3 pixels of 8 channels
    (S.Correlation(a, b, kernel_size=3, pad_size=2, **FAR), [IMAGES] * 2, 648 * (2 * 72 + 1)),
    (S.Pooling(a, kernel=(2, 3)), [IMAGES], 320 * 6),
    (S.UpSampling(a, b, scale=2, sample_type="bilinear", num_filter=8), [IMAGES], 576 * 2 * 16),
    (C.BilinearResize2D(a, height=9, width=9), [IMAGES], 1296 * 8),
    (S.BilinearSampler(a, b), [IMAGES, (2, 2, 5, 5)], 400 * 8),
    (S.softmax_cross_entropy(a, b), [MATRIX, (4,)], 40 * 5),
    (S.add_n(a, b, c), [MATRIX] * 3, 40 * 2),
    (S.elemwise_add(a, b), [MATRIX] * 2, 40),
    (S.broadcast_mul(a, b), [MATRIX, (1, 10)], 40),
    (S.Embedding(a, input_dim=99, output_dim=10), [(4,)], 0),
    (S.take(a, b), [(99, 10), (4,)], 0),
    (S.Concat(a, b, dim=0), [MATRIX, MATRIX], 0),
]

#: Operations for each element.
OF_IMAGES: dict[int, list[Any]] = {
    0: [S.UpSampling(a, scale=2, sample_type="nearest")],
    1: [S.Pooling(a, global_pool=True), C.AdaptiveAvgPooling2D(a, output_size=(2, 2))],
    3: [S.BatchNorm(a, use_global_stats=True)],
    7: [S.BatchNorm(a), C.SyncBatchNorm(a, key="k"), S.InstanceNorm(a), S.GroupNorm(a)],
    8: [C.BatchNormWithReLU(a)],
    10: [S.LRN(a, nsize=5)],
}
OF_MATRICES: dict[int, list[Any]] = {
    0: [S.Reshape(a, shape=(-1,)), S.transpose(a), S.SliceChannel(a, num_outputs=2)]
    + [S.identity(a), S.BlockGrad(a)],
    1: [S.sum(a, axis=1), S.mean(a), S.Activation(a, act_type="tanh"), S.Dropout(a, p=0.5)],
    2: [S.norm(a, axis=1)],
    3: [S.L2Normalization(a)],
    4: [S.moments(a, axes=(0,))],
    5: [S.softmax(a), S.log_softmax(a), S.SoftmaxOutput(a)],
    6: [S.softmin(a)],
    8: [S.LayerNorm(a)],
}
for shape, size, of_each in ((IMAGES, 576, OF_IMAGES), (MATRIX, 40, OF_MATRICES)):
    BY_HAND += [(s, [shape], size * k) for k, symbols in of_each.items() for s in symbols]

WIDE = (2, 4, 9, 7)
#: Of ones: a product is then the number of its summands.
PRODUCTS: list[tuple[Any, list[tuple[int, ...]]]] = [
    (S.Convolution(a, kernel=(3, 2), num_filter=6, stride=(2, 1), no_bias=True), [WIDE]),
    (S.Convolution(a, num_filter=6, num_group=2, dilate=(2, 1), no_bias=True, **THREE), [WIDE]),
    (S.Convolution(a, kernel=(2, 3, 2), num_filter=3, no_bias=True), [(2, 2, 4, 5, 6)]),
    (S.Deconvolution(a, kernel=(3, 2), num_filter=6, num_group=2, stride=(2, 1)), [(2, 4, 5, 7)]),
    (S.FullyConnected(a, num_hidden=5, no_bias=True), [(3, 4, 5)]),
    (S.FullyConnected(a, num_hidden=5, no_bias=True, flatten=False), [(3, 4, 5)]),
    (S.dot(a, b), [(2, 3, 4), (4, 5)]),
    (S.dot(a, b), [(10,), (10,)]),
    (S.dot(a, b, transpose_a=True, transpose_b=True), [(4, 3), (5, 4)]),
    (S.batch_dot(a, b, transpose_b=True), [(2, 3, 4), (2, 5, 4)]),
    (S.batch_dot(a, b, transpose_a=True), [(2, 4, 3), (2, 4, 5)]),
    (L.gemm2(a, b, transpose_b=True), [(2, 3, 4), (2, 5, 4)]),
    (L.gemm2(a, b, transpose_a=True, axis=0), [(4, 2, 3), (4, 2, 5)]),
    (of_np("dot"), [(2, 3, 4), (5, 4, 6)]),
    (of_np("matmul"), [(2, 3, 4), (4, 5)]),
    (of_np("matmul"), [(3, 4), (2, 4, 5)]),
    (of_np("matmul"), [(2, 3, 4), (4,)]),
    (of_np("tensordot", axes=2), [(2, 3, 4), (3, 4, 5)]),
    (of_np("tensordot", axes=((0,), (1,))), [(4, 2, 3), (5, 4)]),
    (of_np("einsum", "bij, bkj -> bik"), [(2, 3, 4), (2, 5, 4)]),
    (of_np("einsum", "...ij,jk"), [(2, 3, 4), (4, 5)]),
]


@pytest.mark.parametrize("row", range(len(BY_HAND)), ids=lambda k: f"{k} {BY_HAND[k][0].name}")
def test_flops_are_those_counted_by_hand(row: int) -> None:
    symbol, shapes, expected = BY_HAND[row]
    assert forward(symbol, dict(zip("abc", shapes))).flops.sum() == expected


@pytest.mark.parametrize("row", range(len(PRODUCTS)), ids=lambda k: f"{k} {PRODUCTS[k][0].name}")
def test_flops_of_products_are_twice_their_summands(row: int) -> None:
    symbol, shapes_of_inputs = PRODUCTS[row]
    shapes = dict(zip("ab", shapes_of_inputs))
    executor = symbol.simple_bind(mx.cpu(), **shapes)
    for array in executor.arg_arrays:
        array[:] = 1
    summands = executor.forward()[0].asnumpy().sum()
    assert forward(symbol, shapes).flops.sum() == 2 * summands


@pytest.mark.parametrize("name", CASES)
def test_every_operator_has_a_count(name: str) -> None:
    counts = forward(small_net(CASES[name]), SMALL_SHAPES).flops
    assert (counts >= 0).all()
    assert counts.sum() > 4 * 10 * 288 * 2  # its first node, a FullyConnected


#: In 1e9 multiply-adds of convolutions and fully connected layers: torchvision's documentation of
#: the same networks (its ResNet-50 strides where the zoo's v2 does); v1: He et al. 2015, Table 1.
PUBLISHED: dict[str, float] = {
    **{"resnet50_v2": 4.09, "vgg16": 15.47, "vgg19": 19.63, "alexnet": 0.71, "densenet121": 2.83},
    **{"inceptionv3": 5.71, "resnet50_v1": 3.8, "resnet152_v1": 11.3},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_flops_of_networks_are_as_published(name: str) -> None:
    image = 299 if name == "inceptionv3" else 224
    graph, published = forward(*networks.model_zoo(name, 2, image)), PUBLISHED[name]
    counts = graph.flops
    products = [i for i, n in enumerate(graph.nodes) if n.op in ("Convolution", "FullyConnected")]
    assert counts[products].sum() / 2 / 2e9 == pytest.approx(published, rel=0.02)
    assert counts[products].sum() < counts.sum() < 1.1 * counts[products].sum()
