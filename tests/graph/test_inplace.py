"""The tables of `inplace`, and hidden outputs, against what MXNet 1.9.1 plans.

Each operator is bound in small graphs, its gradient with it; arrays of 1 MB are never allocated.
"""

from __future__ import annotations

import importlib
import contextlib
import itertools
from typing import Any, Iterable, Iterator, NamedTuple, Sequence, Tuple

import memonger
import mxnet as mx
import numpy as np
import pytest
from memonger.costs.bind import bind, read_planned_mb
from memonger.costs.pool import pool
from memonger.graph.forward import ForwardGraph
from memonger.graph.arrays import Signature
from memonger.graph.operators.inplace import inplace_options, reads_overwritten
from memonger.graph.operators.tensors import Tensor
from memonger.schedules.execution.arena import creator, invoke
from memonger.graph.training import TrainingGraph, training_graph
from memonger.support.symbols import load_nodes
from memonger.support.mxnet import environment

from memory_log import Job, log_of, logged
from operator_cases import CASES as OPERATOR_CASES
from operator_cases import SMALL_SHAPES, small_net
from planned import forward

Shape = Tuple[int, ...]
Pair = Tuple[int, int]  # an input and the output that may lie where it lies

#: Shapes of 1 MB of float32; Q is sequence, batch, channels.
SHAPES: dict[str, Shape] = {
    "T": (4, 4, 128, 128),
    "M": (512, 512),
    "B": (4, 256, 256),
    "Q": (2, 16, 8192),
}

#: The shapes of the inputs (-: inferred) and attributes, with | where they differ: the operators.
#: Inputs and outputs are of one size where they can be, so that in place would be possible.
TABLE = """
T: abs arccos arccosh arcsin arcsinh arctan arctanh cbrt ceil cos cosh degrees erf erfinv exp expm1
  fix floor gamma gammaln log log10 log1p log2 logical_not negative radians rcbrt reciprocal relu
  rint round rsqrt sigmoid sign sin sinh softsign sqrt square tan tanh trunc _copy BlockGrad
  make_loss Flatten softmax log_softmax softmin SoftmaxActivation MakeLoss L2Normalization Dropout
  zeros_like ones_like hard_sigmoid _contrib_div_sqrt_dim _contrib_round_ste _contrib_sign_ste
  _shuffle argsort topk sum mean max min prod nansum nanprod norm argmax transpose shape_array
  size_array squeeze SwapAxis _random_uniform_like _random_normal_like _contrib_box_nms
  _contrib_MultiBoxPrior _contrib_arange_like SequenceMask SequenceReverse SequenceLast
  _contrib_AdaptiveAvgPooling2D
T nsize=3: LRN; T scalar=1: smooth_l1; T a=1: _contrib_quadratic; T axes=(1,): moments
4x1x256x256 axes=(1,): moments
T scalar=2: _plus_scalar _minus_scalar _rminus_scalar _mul_scalar _div_scalar _rdiv_scalar
  _mod_scalar _rmod_scalar _power_scalar _rpower_scalar _maximum_scalar _minimum_scalar
  _hypot_scalar _equal_scalar _not_equal_scalar _greater_scalar _greater_equal_scalar _lesser_scalar
  _lesser_equal_scalar _logical_and_scalar _logical_or_scalar _logical_xor_scalar
  _contrib_gradientmultiplier
T T: elemwise_add elemwise_sub elemwise_mul elemwise_div _grad_add _maximum _minimum _power _hypot
  _mod _equal _not_equal _greater _greater_equal _lesser _lesser_equal _logical_and _logical_or
  _logical_xor broadcast_add broadcast_sub broadcast_mul broadcast_div broadcast_mod broadcast_power
  broadcast_maximum broadcast_minimum broadcast_hypot broadcast_equal broadcast_not_equal
  broadcast_greater broadcast_greater_equal broadcast_lesser broadcast_lesser_equal
  broadcast_logical_and broadcast_logical_or broadcast_logical_xor reshape_like
  _identity_with_attr_like_rhs broadcast_like slice_like LinearRegressionOutput
  LogisticRegressionOutput MAERegressionOutput
T 1x4x1x1: broadcast_add broadcast_mul broadcast_div
4x1x256x256 axis=1 keepdims=True: sum mean max min prod nansum nanprod norm argmax argmin
262144x1: argmax_channel; 262144x1 262144: pick SVMOutput; T num_args=1 dim=1: Concat
T T num_args=2 dim=1: Concat; T num_args=1: stack; T num_outputs=1|2: SliceChannel
T indices=(0,)|(0,2) axis=1: _split_v2; 4x1x256x256 axis=1 size=1: broadcast_axis
4x1x128x128 axis=1 size=4: broadcast_axis; T shape=(0,0,0,0): broadcast_to
4x1x128x128 shape=(4,4,128,128): broadcast_to
T scale=1|2 sample_type=nearest num_args=1: UpSampling
T mode=constant pad_width=(0,0,0,0,0,0,0,0)|(0,0,0,0,1,1,1,1): Pad; T normalization=null: MakeLoss
T output_size=(128,128): _contrib_AdaptiveAvgPooling2D; 262144 dim=0 num_args=1: _rnn_param_concat
131072 131072 dim=0 num_args=2: _rnn_param_concat; 262144 depth=1: one_hot; 1024 depth=256: one_hot
262144x1x1: _linalg_sumlogdiag; 512x1x512 512x1x1024 heads=1: _contrib_interleaved_matmul_encdec_qk
64x1x4096 64x1x8192 heads=4: _contrib_interleaved_matmul_encdec_qk
512x1x1536 1x512x512 heads=1: _contrib_interleaved_matmul_selfatt_valatt
64x1x12288 4x64x64 heads=4: _contrib_interleaved_matmul_selfatt_valatt
512x1x1024 1x512x512 heads=1: _contrib_interleaved_matmul_encdec_valatt
64x1x8192 4x64x64 heads=4: _contrib_interleaved_matmul_encdec_valatt
T - - num_filter=4 kernel=(3,3) pad=(1,1): Convolution Convolution_v1
T - num_filter=4 num_group=4 no_bias=True kernel=(3,3) pad=(1,1): Convolution
T - num_filter=4 kernel=(3,3) pad=(1,1): Deconvolution; M - - num_hidden=512: FullyConnected
M - num_hidden=512 no_bias=True: FullyConnected; B - - num_hidden=256 flatten=False: FullyConnected
M M: dot _sample_normal; M M transpose_b=True: dot
B B: batch_dot _linalg_gemm2 _linalg_trmm _linalg_trsm; B B B: _linalg_gemm
B: _linalg_syrk _linalg_potrf _linalg_potri _linalg_inverse _linalg_det _linalg_slogdet
  _linalg_sumlogdiag _linalg_gelqf _linalg_syevd
M -: IdentityAttachKLSparseReg; 1x512 M num_args=2: khatri_rao
T act_type=relu|sigmoid|tanh|softrelu|softsign: Activation
T act_type=leaky|elu|selu|gelu|rrelu: LeakyReLU; T - act_type=prelu: LeakyReLU
T axes=(2,3): Dropout; T - - - -: BatchNorm BatchNorm_v1 _contrib_BatchNormWithReLU
T - - - - axis=3 output_mean_var=True: BatchNorm; T - - - - key=k: _contrib_SyncBatchNorm
T - -: LayerNorm InstanceNorm; T - - axis=1 output_mean_var=True: LayerNorm
T - - num_groups=2: GroupNorm; T mode=channel|spatial: L2Normalization
T pool_type=max kernel=(3,3) pad=(1,1): Pooling Pooling_v1
T pool_type=avg|sum kernel=(3,3) pad=(1,1): Pooling
T pool_type=lp p_value=2 kernel=(3,3) pad=(1,1): Pooling
T pool_type=max layout=NCHW kernel=(3,3) pad=(1,1): Pooling
4x4x16384 pool_type=max layout=NCW kernel=(3,) pad=(1,): Pooling
T pool_type=max global_pool=True: Pooling; T pool_type=max global_pool=True kernel=(1,1): Pooling
T dtype=float32: softmax log_softmax Cast amp_cast; T dtype=float64: softmax Cast
M 512 use_length=True: softmax
M 512: SoftmaxOutput SVMOutput softmax_cross_entropy take pick _random_pdf_exponential
  _random_pdf_poisson
T 4x128x128 multi_output=True use_ignore=True: SoftmaxOutput; 64x16x256 16x8: CTCLoss
1024 1024x256 input_dim=1024 output_dim=256: Embedding
Q - - - mode=lstm state_size=8192 num_layers=1: RNN
Q - - mode=gru state_size=8192 num_layers=1 state_outputs=1: RNN
64x1x12288 heads=4: _contrib_interleaved_matmul_selfatt_qk
Q 16 use_sequence_length=True: SequenceMask SequenceReverse
1x262144 262144 use_sequence_length=True: SequenceMask
1x16x16384 16 use_sequence_length=True: SequenceLast; T shape=(-1,512): Reshape
T axis=0: expand_dims; T dtype=float16: Cast; T T num_outputs=2: amp_multicast
T axes=(0,2,3,1): transpose; T T num_args=2: stack Crop; T T T num_args=3: add_n
T begin=(0,0) end=(4,4): slice; T axis=1 begin=0 end=4: slice_axis
T T begin=(0,) end=(4,): _slice_assign; T begin=(0,) end=(2,) scalar=1: _slice_assign_scalar
T axis=1: reverse sum norm sort; T reps=(1,1,1,1): tile; T repeats=1 axis=0: repeat
T a_min=0 a_max=1: clip; T T T: where; M 1x512: gather_nd; M 1x512 shape=(512,512): scatter_nd
M M 1x512 shape=(512,512): _scatter_set_nd; M 512 M: _contrib_index_copy
T block_size=2: depth_to_space space_to_depth; M: diag; T kernel=(1,1): im2col
T stype=default: cast_storage; T axis=(): sum; T ret_typ=value|both k=128: topk
T ret_typ=mask k=1: topk; 2x131072 shape=(4,4): _ravel_multi_index
T 64x5 pooled_size=(32,32) spatial_scale=1: ROIPooling _contrib_ROIAlign
T 64x5 spatial_scale=1 output_dim=1 pooled_size=2 group_size=2: _contrib_PSROIPooling
1x16x128x128 256x5 spatial_scale=1 output_dim=4 pooled_size=16 group_size=2 no_trans=True:
  _contrib_DeformablePSROIPooling
1x65536x4 2x8x5 2x2x65536: _contrib_MultiBoxTarget
4x2x32768 4x131072 1x32768x4: _contrib_MultiBoxDetection
1x2x64x64 1x4x64x64 1x3 scales=(8,) ratios=(1,) rpn_post_nms_top_n=300: _contrib_Proposal
2x2x64x64 2x4x64x64 2x3 scales=(8,) ratios=(1,) rpn_post_nms_top_n=300: _contrib_MultiProposal
2x16384x6: _contrib_box_nms; 512x4 512x4: _contrib_box_iou
M threshold=0.5: _contrib_bipartite_matching; T height=128 width=128: _contrib_BilinearResize2D
T 4x18x128x128 - - num_filter=4 kernel=(3,3) pad=(1,1): _contrib_DeformableConvolution
T T pad_size=4 max_displacement=4: Correlation; T 4x2x128x128: BilinearSampler
4x6 transform_type=affine target_shape=(256,256): GridGenerator
2x2x256x256 transform_type=warp: GridGenerator
T 4x6 transform_type=affine sampler_type=bilinear target_shape=(128,128): SpatialTransformer
shape=(512,512): _random_uniform _random_gamma; M shape=(512,): _sample_multinomial
M 512 512: _random_pdf_normal _random_pdf_uniform _random_pdf_gamma
512x512x1 M M: _random_pdf_normal; 512x512x1 M: _random_pdf_exponential
T: _npx_relu _np_copy _npi_absolute _npi_around _npi_log _npi_nan_to_num _npi_tril _np_transpose
  _np_sum _np_max _np_cumsum _npi_mean _npi_var
T T: _npi_add _npi_subtract _npi_multiply _npi_mod _npi_power _npi_true_divide _npi_hypot
  _npi_copysign _npi_ldexp _npi_arctan2
T 1x4x1x1: _npi_add _npi_multiply _npi_power
1x4x1x1 T: _npi_true_divide
T scalar=2: _npi_add_scalar _npi_rsubtract_scalar _npi_mod_scalar _npi_power_scalar
  _npi_true_divide_scalar _npi_rtrue_divide_scalar _npi_ldexp_scalar _npi_arctan2_scalar
T T T: _npi_where; T T scalar=1: _npi_where_lscalar _npi_where_rscalar
4x1x256x256 axis=1 keepdims=True: _np_sum _npi_mean
T axis=1: _npi_flip _np_cumsum; T fill_value=1: _npi_full_like
T newshape=(-1,512): _np_reshape _npx_reshape; 4x1x128x128 shape=(4,4,128,128): _npi_broadcast_to
T axes=(0,2,3,1): _np_transpose; T source=1 destination=3: _np_moveaxis; T shift=1: _np_roll
T T num_args=2 axis=1: _npi_concatenate _npi_stack
T pad_width=((0,0),(0,0),(1,1),(1,1)) mode=constant: _npi_pad; M k=0: _np_diag _npi_tril
M M: _np_dot _npi_matmul; B B: _npi_matmul; M M num_args=2 subscripts=ij,jk->ik: _npi_einsum
M M a_axes_summed=(1,) b_axes_summed=(0,): _npi_tensordot; M M axes=1: _npi_tensordot_int_axes
B: _npi_cholesky _npi_svd; shape=(512,512): _npi_zeros
"""


class Case(NamedTuple):
    op: str
    attrs: dict[str, str]
    shapes: Sequence[Shape | None]


def read_table() -> Iterator[tuple[str, Case]]:
    for entry in TABLE.strip().replace("\n  ", " ").replace("; ", "\n").splitlines():
        inputs, operators = entry.split(":")
        words = [word.partition("=") for word in inputs.split()]
        shapes = [
            None if w == "-" else SHAPES.get(w) or tuple(map(int, w.split("x")))
            for w, equals, _ in words
            if not equals
        ]
        names = [w for w, equals, _ in words if equals]
        for values in itertools.product(*(v.split("|") for _, equals, v in words if equals)):
            for op in operators.split():
                attrs = dict(zip(names, values))
                yield (
                    " ".join([op, *map(str, shapes), *map("=".join, attrs.items())]),
                    Case(op, attrs, shapes),
                )


CASES = dict(read_table())

# What is kept to the end, so that its memory is not free when the operator asks for some, and which
# of the inputs and gradients may be overwritten.
VARIANTS = (
    "forward",
    "forward, inputs chained",  # each input made from the next
    "forward, only first input made",  # the other inputs are variables
    "forward, only last input made",
    "train",
    "train, input kept",
    "train, output kept",
    "train, gradient shared",  # somebody else reads the gradient of the output after it
    "train, only last input made",
)
LARGE = 1 << 16


def elements(shape: Shape | None) -> int:
    return 0 if shape is None else int(np.prod(shape))


def build(c: Case, variant: str) -> Any:
    """Build input(s) -> _mul_scalar -> the operator -> _mul_scalar for each output."""
    nodes: list[dict[str, Any]] = []

    def emit(op: str, name: str, *inputs: Pair, **attrs: str) -> Pair:
        links = [[i, k, 0] for i, k in inputs]
        nodes.append({"op": op, "name": name, "inputs": links, "attrs": attrs})
        return len(nodes) - 1, 0

    def doubled(name: str, source: Pair) -> Pair:
        return emit("_mul_scalar", name, source, scalar="2")

    large = [i for i, shape in enumerate(c.shapes) if elements(shape) >= LARGE]
    computed = large[:1] if "first" in variant else large[-1:] if "last" in variant else large
    inputs: dict[int, Pair] = {}
    for i, shape in reversed(list(enumerate(c.shapes))):
        chained = "chained" in variant and i in large and shape == (*c.shapes, None)[i + 1]
        source = inputs[i + 1] if chained else emit("null", f"x{i}")
        inputs[i] = doubled(f"from{i}", source) if i in computed else source
    index, _ = emit(c.op, "f", *(inputs[i] for i in range(len(c.shapes))), **c.attrs)
    internals = load_nodes(nodes, [[index, 0, 0]]).get_internals().list_outputs()
    outputs = [(index, k) for k in range(sum(name.startswith("f_") for name in internals))]
    heads = []
    for i, k in outputs:
        head = i, k
        if "shared" in variant:
            side = doubled(f"side{k}", emit("null", f"s{k}"))
            head = emit("add_n", f"to{k}", head, side, num_args="2")
        else:
            head = doubled(f"to{k}", head)
        if "forward" in variant:  # what has no gradient is none the worse for it
            head = emit("BlockGrad", f"end{k}", head)
        heads.append(head)
    if "input" in variant and "kept" in variant:
        heads += [inputs[i] for i in large]
    if "output" in variant:
        heads += outputs
    return load_nodes(nodes, [[i, k, 0] for i, k in heads])


def graph_of(c: Case, variant: str) -> tuple[Any, dict[str, Shape], ForwardGraph, list[int]]:
    """Return the symbol, its shapes, its graph, and the arguments that get a gradient."""
    symbol = build(c, variant)
    names = symbol.list_arguments()
    shapes_of_inputs = {f"x{i}": shape for i, shape in enumerate(c.shapes)}
    shapes = {name: shape for name, shape in shapes_of_inputs.items() if shape and name in names}
    graph = forward(symbol, shapes, {name: "float32" for name in names if name[0] == "x"})
    wanted = [a for a in graph.arguments if elements(graph.tensors[a][0].shape) >= LARGE]
    return symbol, shapes, graph, (wanted or list(graph.arguments)) if "train" in variant else []


def trainings(c: Case) -> Iterator[tuple[Any, TrainingGraph]]:
    """Yield all variants; an operator without gradient has only those of the forward graph."""
    for variant in VARIANTS:
        symbol, _, graph, wanted = graph_of(c, variant)
        try:
            training = training_graph(graph, wanted)
            if "forward" in variant or not training.inexact:
                yield symbol, training
        except memonger.MemongerError as error:
            assert "train" in variant and "has no gradient" in str(error)
            with pytest.raises(memonger.MemongerError, match="non-differentiable"):
                bind(symbol, graph, mx.cpu(), wanted)


def pool_mb(training: TrainingGraph) -> int:
    nothing = np.zeros(len(training.graph.nodes), dtype=np.bool_)
    return pool(training, nothing).planned_bytes >> 20


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (k % 12 > 0)) for k, n in enumerate(CASES)],
)
def test_the_pool_is_that_of_mxnet_in_all_small_graphs_of_an_operator(name: str) -> None:
    with environment(MXNET_SUBGRAPH_BACKEND="NONE"):
        for symbol, training in trainings(CASES[name]):
            executor = bind(symbol, training.graph, mx.cpu(), training.wanted)
            assert pool_mb(training) == read_planned_mb(executor)


def test_every_entry_is_as_logged() -> None:
    """The hidden outputs too: shapes and KB as MXNet logs them."""
    jobs, plans = [], []
    for c in CASES.values():
        symbol, shapes, graph, _ = graph_of(c, "forward")
        jobs.append(Job(symbol.tojson(remove_amp_cast=False), shapes, None, []))
        nothing = np.zeros(len(graph.nodes), dtype=np.bool_)
        plans.append(pool(training_graph(graph, []), nothing))
    with environment(MXNET_SUBGRAPH_BACKEND="NONE"):
        seen = logged(jobs)
    for name, plan, nodes in zip(CASES, plans, seen):
        assert log_of(plan) == nodes, name


def test_pairs_that_no_total_shows_are_in_the_table() -> None:
    """In every graph here another pair of the operator takes their place."""
    of_one = "cbrt erfinv log_softmax relu rpower_scalar sigmoid softmax softmin sqrt tan tanh"
    for op in of_one.split():
        assert inplace_options("_backward_" + op, {}, 2) == ((0, 0, False), (1, 0, False)), op
    for op in ("_backward_sub", "_backward_broadcast_sub"):
        assert inplace_options(op, {}, 1) == ((0, 0, False), (0, 1, False)), op


def test_operators_that_are_in_no_table_have_no_options() -> None:
    assert inplace_options("sgd_mom_update", {}, 3) is None
    assert inplace_options("_contrib_quantized_conv", {}, 9) is None
    assert inplace_options("_backward_foreach", {}, 3) == ()


def signatures(cases: Iterable[Any]) -> Iterator[tuple[Signature, list[Tensor]]]:
    """Yield each operator of the cases that has in-place options, and the tensors that it reads."""
    seen = set()
    for case in cases:
        training = training_graph(forward(small_net(case), SMALL_SHAPES))
        t = training.arrays
        for row, signature in enumerate(training.signatures):
            reads = slice(*t.read_start[row : row + 2])
            entries = list(zip(t.read_row[reads].tolist(), t.read_output[reads].tolist()))
            key = str((signature.op, signature.attrs, signature.tensors))
            if signature.options and key not in seen and all(r >= 0 for r, _ in entries):
                seen.add(key)
                yield signature, [training.signatures[r].tensors[k] for r, k in entries]


def results(signature: Signature, inputs: Sequence[Tensor], option: Pair | None) -> list[Any]:
    """Run an operator on numbers in [-1, 1), one of its outputs in place of an input."""
    random = np.random.RandomState(0)
    reads = [mx.nd.array(random.uniform(-1, 1, x.shape), dtype=x.dtype) for x in inputs]
    writes = [mx.nd.zeros(x.shape, dtype=x.dtype) for x in signature.tensors]
    if option is not None:
        j, k = option
        writes[k] = reads[j].reshape(writes[k].shape)
    mx.random.seed(0)
    with mx.autograd.train_mode():
        invoke(creator(signature.op), reads, signature.attrs, writes)
    return [array.asnumpy() for array in writes]


@pytest.mark.slow
def test_what_reads_what_it_has_overwritten() -> None:
    """All other operators compute the same in place of an input as apart from it."""
    differ, tried = set(), set()
    for signature, inputs in signatures(OPERATOR_CASES.values()):
        op, outputs = signature.op, signature.tensors
        for j, k, _ in signature.options:
            if (inputs[j].elements, inputs[j].dtype) != (outputs[k].elements, outputs[k].dtype):
                continue
            with contextlib.suppress(mx.MXNetError):  # what needs the state of its operator
                apart, in_place = (results(signature, inputs, o) for o in (None, (j, k)))
                tried.add(op)
                if not all(map(np.array_equal, apart, in_place, itertools.repeat(True))):
                    differ.add((op, reads_overwritten(op, signature.attrs)))
    assert differ == {("_backward_LeakyReLU", True)} and len(tried) > 150


TABLES = {
    "inplace": ("IGNORED",),
    "layouts": ("PRODUCES_BLOCKED",),
    "recompute": ("CONTROL_FLOW", "UNTOUCHED", "UNREAD_ANYWHERE", "UNREAD_UNFUSED"),
    "recorded": ("PRODUCTS", "BY_MKLDNN", "NOT_INTO_ARRAYS", "ASYNCHRONOUS"),
    "added": ("WRONG", "ROUNDING"),
}


@pytest.mark.parametrize("module", TABLES)
def test_every_name_in_a_table_of_facts_is_an_operator(module: str) -> None:
    """A misspelt one would have no effect."""
    registered = set(mx.operator.get_all_registered_operators())
    facts = importlib.import_module(f"memonger.graph.operators.{module}")
    for table in TABLES[module]:
        assert set(getattr(facts, table)) <= registered, table
