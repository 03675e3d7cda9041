"""The tables of `inplace`, and outputs that nothing shows, against what MXNet 1.9.1 really plans.

MXNet does not show an operator's in-place options, but it shows the plan: ``Executor.debug_str``
ends with the megabytes of the pool, and with MXNET_MEM_PLAN_VERBOSE_LOGGING=1 each bind logs the
shape of every entry, hidden outputs included. So every operator is bound in small graphs (arrays of
1 MB that are never allocated), its gradient with it, and the plan is replayed here with the tables.
The totals must agree, and `test_tables_matter` makes sure that a wrong table would be seen.

The variable is read once per process, so one subprocess (this file as a script) does the binds.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from bisect import bisect_left, bisect_right, insort
from typing import Any, Iterator, NamedTuple, Sequence, Tuple

import pytest

from memonger.support.mxnet import mx
from memonger.graph.inputs import read_shapes
from memonger.graph.operators.inplace import ignored_inputs, inplace_options
from memonger.graph.read import forward_graph

Shape = Tuple[int, ...]

# ------------------------------------------------------------------ the cases

T: Shape = (4, 4, 128, 128)  # 1 MB of float32, as are all the large ones
M: Shape = (512, 512)
B: Shape = (4, 256, 256)
Q: Shape = (2, 16, 8192)  # sequence, batch, channels


class Case(NamedTuple):
    """One operator: large inputs come from `_mul_scalar`, the others are variables."""

    op: str
    attrs: dict[str, str]
    shapes: Sequence[Shape | None]  # None: inferred


def case(op: str, *shapes: Shape | None, **attrs: str) -> Case:
    return Case(op, attrs, shapes)


UNARY = """
    abs arccos arccosh arcsin arcsinh arctan arctanh cbrt ceil cos cosh degrees erf erfinv exp expm1
    fix floor gamma gammaln log log10 log1p log2 logical_not negative radians rcbrt reciprocal relu
    rint round rsqrt sigmoid sign sin sinh softsign sqrt square tan tanh trunc _copy BlockGrad
    make_loss Flatten softmax log_softmax softmin SoftmaxActivation MakeLoss L2Normalization LRN
    Dropout zeros_like ones_like hard_sigmoid smooth_l1 _contrib_div_sqrt_dim _contrib_round_ste
    _contrib_sign_ste _contrib_quadratic _shuffle argsort topk sum mean max min prod nansum
    nanprod norm argmax transpose shape_array size_array squeeze SwapAxis
    _random_uniform_like _random_normal_like _contrib_box_nms
    _contrib_MultiBoxPrior _contrib_arange_like SequenceMask SequenceReverse SequenceLast moments
    _contrib_AdaptiveAvgPooling2D
"""
REDUCE = "sum mean max min prod nansum nanprod norm argmax argmin"
SCALAR = """
    _plus_scalar _minus_scalar _rminus_scalar _mul_scalar _div_scalar _rdiv_scalar _mod_scalar
    _rmod_scalar _power_scalar _rpower_scalar _maximum_scalar _minimum_scalar _hypot_scalar
    _equal_scalar _not_equal_scalar _greater_scalar _greater_equal_scalar _lesser_scalar
    _lesser_equal_scalar _logical_and_scalar _logical_or_scalar _logical_xor_scalar
    _contrib_gradientmultiplier
"""
BINARY = """
    elemwise_add elemwise_sub elemwise_mul elemwise_div _grad_add _maximum _minimum _power _hypot
    _mod _equal _not_equal _greater _greater_equal _lesser _lesser_equal _logical_and _logical_or
    _logical_xor broadcast_add broadcast_sub broadcast_mul broadcast_div broadcast_mod
    broadcast_power broadcast_maximum broadcast_minimum broadcast_hypot broadcast_equal
    broadcast_not_equal broadcast_greater broadcast_greater_equal broadcast_lesser
    broadcast_lesser_equal broadcast_logical_and broadcast_logical_or broadcast_logical_xor
    reshape_like _identity_with_attr_like_rhs broadcast_like slice_like LinearRegressionOutput
    LogisticRegressionOutput MAERegressionOutput
"""
POOL = {"kernel": "(3, 3)", "pad": "(1, 1)"}
ANCHORS = {"scales": "(8,)", "ratios": "(1,)", "rpn_post_nms_top_n": "300"}
CASES: list[Case] = [
    *[case(op, T) for op in UNARY.split()],
    *[case(op, T, scalar="2") for op in SCALAR.split()],
    *[case(op, T, T) for op in BINARY.split()],
    *[case(op, T, (1, 4, 1, 1)) for op in ("broadcast_add", "broadcast_mul", "broadcast_div")],
    # inputs and outputs of one size, so that in place would be possible
    *[case(op, (4, 1, 256, 256), axis="1", keepdims="True") for op in REDUCE.split()],
    case("moments", (4, 1, 256, 256), axes="(1,)"),
    case("argmax_channel", (262144, 1)),
    case("pick", (262144, 1), (262144,)),
    case("Concat", T, num_args="1", dim="1"),
    case("stack", T, num_args="1"),
    case("SliceChannel", T, num_outputs="1"),
    case("_split_v2", T, indices="(0,)", axis="1"),
    case("broadcast_axis", (4, 1, 256, 256), axis="1", size="1"),
    case("broadcast_to", T, shape="(0, 0, 0, 0)"),
    case("UpSampling", T, scale="1", sample_type="nearest", num_args="1"),
    case("Pad", T, mode="constant", pad_width="(0, 0, 0, 0, 0, 0, 0, 0)"),
    case("MakeLoss", T, normalization="null"),
    case("SVMOutput", (262144, 1), (262144,)),
    case("_contrib_AdaptiveAvgPooling2D", T, output_size="(128, 128)"),
    case("_rnn_param_concat", (262144,), dim="0", num_args="1"),
    case("one_hot", (262144,), depth="1"),
    case("_linalg_sumlogdiag", (262144, 1, 1)),
    case("_contrib_interleaved_matmul_encdec_qk", (512, 1, 512), (512, 1, 1024), heads="1"),
    case("_contrib_interleaved_matmul_selfatt_valatt", (512, 1, 1536), (1, 512, 512), heads="1"),
    case("_contrib_interleaved_matmul_encdec_valatt", (512, 1, 1024), (1, 512, 512), heads="1"),
    # convolution, matrices
    case("Convolution", T, None, None, num_filter="4", **POOL),
    case("Convolution", T, None, num_filter="4", num_group="4", no_bias="True", **POOL),
    case("Convolution_v1", T, None, None, num_filter="4", **POOL),
    case("Deconvolution", T, None, num_filter="4", **POOL),
    case("FullyConnected", M, None, None, num_hidden="512"),
    case("FullyConnected", M, None, num_hidden="512", no_bias="True"),
    case("FullyConnected", B, None, None, num_hidden="256", flatten="False"),
    case("dot", M, M),
    case("dot", M, M, transpose_b="True"),
    case("batch_dot", B, B),
    case("_linalg_gemm", B, B, B),
    case("_linalg_gemm2", B, B),
    case("_linalg_trmm", B, B),
    case("_linalg_trsm", B, B),
    case("_linalg_syrk", B),
    case("_linalg_potrf", B),
    case("_linalg_potri", B),
    case("_linalg_inverse", B),
    case("_linalg_det", B),
    case("_linalg_slogdet", B),
    case("_linalg_sumlogdiag", B),
    case("_linalg_gelqf", B),
    case("_linalg_syevd", B),
    case("IdentityAttachKLSparseReg", M, None),
    case("khatri_rao", (1, 512), (512, 512), num_args="2"),
    # neural network layers
    *[
        case("Activation", T, act_type=act)
        for act in ("relu", "sigmoid", "tanh", "softrelu", "softsign")
    ],
    *[case("LeakyReLU", T, act_type=act) for act in ("leaky", "elu", "selu", "gelu", "rrelu")],
    case("LeakyReLU", T, None, act_type="prelu"),
    case("Dropout", T, axes="(2, 3)"),
    case("BatchNorm", T, None, None, None, None),
    case("BatchNorm", T, None, None, None, None, axis="3", output_mean_var="True"),
    case("BatchNorm_v1", T, None, None, None, None),
    case("_contrib_SyncBatchNorm", T, None, None, None, None, key="k"),
    case("_contrib_BatchNormWithReLU", T, None, None, None, None),
    case("LayerNorm", T, None, None),
    case("LayerNorm", T, None, None, axis="1", output_mean_var="True"),
    case("GroupNorm", T, None, None, num_groups="2"),
    case("InstanceNorm", T, None, None),
    case("L2Normalization", T, mode="channel"),
    case("L2Normalization", T, mode="spatial"),
    case("Pooling", T, pool_type="max", **POOL),
    case("Pooling", T, pool_type="avg", **POOL),
    case("Pooling", T, pool_type="sum", **POOL),
    case("Pooling", T, pool_type="lp", p_value="2", **POOL),
    case("Pooling", T, pool_type="max", layout="NCHW", **POOL),
    case("Pooling", (4, 4, 16384), pool_type="max", layout="NCW", kernel="(3,)", pad="(1,)"),
    case("Pooling", T, pool_type="max", global_pool="True"),
    case("Pooling", T, pool_type="max", global_pool="True", kernel="(1, 1)"),
    case("Pooling_v1", T, pool_type="max", **POOL),
    case("UpSampling", T, scale="2", sample_type="nearest", num_args="1"),
    case("softmax", T, dtype="float32"),
    case("softmax", T, dtype="float64"),
    case("softmax", M, (512,), use_length="True"),
    case("log_softmax", T, dtype="float32"),
    case("SoftmaxOutput", M, (512,)),
    case("SoftmaxOutput", T, (4, 128, 128), multi_output="True", use_ignore="True"),
    case("SVMOutput", M, (512,)),
    case("softmax_cross_entropy", M, (512,)),
    case("CTCLoss", (64, 16, 256), (16, 8)),
    case("Embedding", (1024,), (1024, 256), input_dim="1024", output_dim="256"),
    case("RNN", Q, None, None, None, mode="lstm", state_size="8192", num_layers="1"),
    case("RNN", Q, None, None, mode="gru", state_size="8192", num_layers="1", state_outputs="1"),
    case("_rnn_param_concat", (131072,), (131072,), dim="0", num_args="2"),
    # transformers
    case("_contrib_interleaved_matmul_selfatt_qk", (64, 1, 12288), heads="4"),
    case("_contrib_interleaved_matmul_selfatt_valatt", (64, 1, 12288), (4, 64, 64), heads="4"),
    case("_contrib_interleaved_matmul_encdec_qk", (64, 1, 4096), (64, 1, 8192), heads="4"),
    case("_contrib_interleaved_matmul_encdec_valatt", (64, 1, 8192), (4, 64, 64), heads="4"),
    # sequences
    case("SequenceMask", Q, (16,), use_sequence_length="True"),
    case("SequenceMask", (1, 262144), (262144,), use_sequence_length="True"),
    case("SequenceReverse", Q, (16,), use_sequence_length="True"),
    case("SequenceLast", (1, 16, 16384), (16,), use_sequence_length="True"),
    # shape and indexing
    case("Reshape", T, shape="(-1, 512)"),
    case("expand_dims", T, axis="0"),
    case("Cast", T, dtype="float32"),
    case("Cast", T, dtype="float64"),
    case("Cast", T, dtype="float16"),
    case("amp_cast", T, dtype="float32"),
    case("amp_multicast", T, T, num_outputs="2"),
    case("transpose", T, axes="(0, 2, 3, 1)"),
    case("Concat", T, T, num_args="2", dim="1"),
    case("stack", T, T, num_args="2"),
    case("add_n", T, T, T, num_args="3"),
    case("SliceChannel", T, num_outputs="2"),
    case("_split_v2", T, indices="(0, 2)", axis="1"),
    case("slice", T, begin="(0, 0)", end="(4, 4)"),
    case("slice_axis", T, axis="1", begin="0", end="4"),
    case("_slice_assign", T, T, begin="(0,)", end="(4,)"),
    case("_slice_assign_scalar", T, begin="(0,)", end="(2,)", scalar="1"),
    case("reverse", T, axis="1"),
    case("tile", T, reps="(1, 1, 1, 1)"),
    case("repeat", T, repeats="1", axis="0"),
    case("Pad", T, mode="constant", pad_width="(0, 0, 0, 0, 1, 1, 1, 1)"),
    case("clip", T, a_min="0", a_max="1"),
    case("where", T, T, T),
    case("take", M, (512,)),
    case("pick", M, (512,)),
    case("one_hot", (1024,), depth="256"),
    case("gather_nd", M, (1, 512)),
    case("scatter_nd", M, (1, 512), shape="(512, 512)"),
    case("_scatter_set_nd", M, M, (1, 512), shape="(512, 512)"),
    case("_contrib_index_copy", M, (512,), M),
    case("broadcast_axis", (4, 1, 128, 128), axis="1", size="4"),
    case("broadcast_to", (4, 1, 128, 128), shape="(4, 4, 128, 128)"),
    case("depth_to_space", T, block_size="2"),
    case("space_to_depth", T, block_size="2"),
    case("diag", M),
    case("im2col", T, kernel="(1, 1)"),
    case("cast_storage", T, stype="default"),
    case("sum", T, axis="1"),
    case("sum", T, axis="()"),
    case("norm", T, axis="1"),
    case("sort", T, axis="1"),
    case("topk", T, ret_typ="value", k="128"),
    case("topk", T, ret_typ="both", k="128"),
    case("topk", T, ret_typ="mask", k="1"),
    case("_ravel_multi_index", (2, 131072), shape="(4, 4)"),
    # detection
    case("ROIPooling", T, (64, 5), pooled_size="(32, 32)", spatial_scale="1"),
    case("_contrib_ROIAlign", T, (64, 5), pooled_size="(32, 32)", spatial_scale="1"),
    case(
        "_contrib_PSROIPooling",
        *(T, (64, 5)),
        **{"spatial_scale": "1", "output_dim": "1", "pooled_size": "2", "group_size": "2"},
    ),
    case(
        "_contrib_DeformablePSROIPooling",
        *((1, 16, 128, 128), (256, 5)),
        **{"spatial_scale": "1", "output_dim": "4", "pooled_size": "16", "group_size": "2"},
        no_trans="True",
    ),
    case("_contrib_MultiBoxTarget", (1, 65536, 4), (2, 8, 5), (2, 2, 65536)),
    case("_contrib_MultiBoxDetection", (4, 2, 32768), (4, 131072), (1, 32768, 4)),
    case("_contrib_Proposal", (1, 2, 64, 64), (1, 4, 64, 64), (1, 3), **ANCHORS),
    case("_contrib_MultiProposal", (2, 2, 64, 64), (2, 4, 64, 64), (2, 3), **ANCHORS),
    case("_contrib_box_nms", (2, 16384, 6)),
    case("_contrib_box_iou", (512, 4), (512, 4)),
    case("_contrib_bipartite_matching", M, threshold="0.5"),
    case("_contrib_BilinearResize2D", T, height="128", width="128"),
    case(
        "_contrib_DeformableConvolution", T, (4, 18, 128, 128), None, None, num_filter="4", **POOL
    ),
    case("Crop", T, T, num_args="2"),
    case("Correlation", T, T, pad_size="4", max_displacement="4"),
    case("BilinearSampler", T, (4, 2, 128, 128)),
    case("GridGenerator", (4, 6), transform_type="affine", target_shape="(256, 256)"),
    case("GridGenerator", (2, 2, 256, 256), transform_type="warp"),
    case(
        "SpatialTransformer",
        *(T, (4, 6)),
        **{"transform_type": "affine", "sampler_type": "bilinear", "target_shape": "(128, 128)"},
    ),
    # random
    case("_random_uniform", shape="(512, 512)"),
    case("_random_gamma", shape="(512, 512)"),
    case("_sample_normal", M, M),
    case("_sample_multinomial", M, shape="(512,)"),
    *[case("_random_pdf_" + name, M, (512,)) for name in ("exponential", "poisson")],
    *[case("_random_pdf_" + name, M, (512,), (512,)) for name in ("normal", "uniform", "gamma")],
    *[case("_random_pdf_normal", (512, 512, 1), M, M)],
    *[case("_random_pdf_exponential", (512, 512, 1), M)],
]
# The attributes without which these operators are refused.
REQUIRED: dict[str, dict[str, str]] = {
    "LRN": {"nsize": "3"},
    "moments": {"axes": "(1,)"},
    "smooth_l1": {"scalar": "1"},
    "_contrib_quadratic": {"a": "1"},
}
CASES = [c._replace(attrs={**REQUIRED.get(c.op, {}), **c.attrs}) for c in CASES]
NAMES = [f"{c.op} {' '.join((k + v for k, v in c.attrs.items()))}" for c in CASES]
NAMES = ["%d %s" % item for item in enumerate(NAMES)]

# The graphs around each operator: what is kept to the end, so that its memory is not free when the
# operator asks for some, and which of the inputs and gradients may be overwritten.
VARIANTS = (
    "forward",
    "forward, inputs chained",  # each input made from the next
    "forward, only first input made",  # the other inputs are variables
    "forward, only last input made",
    "train",
    "train, input kept",
    "train, output kept",
    "train, input and output kept",
    "train, gradient shared",  # somebody else reads the gradient of the output after it
    "train, only last input made",
)

# ------------------------------------------------------------------ in the subprocess: bind


def json_symbol(nodes: list[dict[str, Any]], heads: list[list[int]]) -> Any:
    args = [i for i, node in enumerate(nodes) if node["op"] == "null"]
    graph = {"nodes": nodes, "arg_nodes": args, "heads": heads}
    return mx.sym.load_json(json.dumps({**graph, "attrs": {"mxnet_version": ["int", 10901]}}))


def visible_outputs(nodes: list[dict[str, Any]]) -> int:
    """How many outputs of the last node Symbol.list_outputs shows."""
    internals = json_symbol(nodes, [[len(nodes) - 1, 0, 0]]).get_internals()
    heads = json.loads(internals.tojson())["heads"]
    return sum(1 for head in heads if head[0] == len(nodes) - 1)


LARGE = 1 << 16


def elements(shape: Shape) -> int:
    count = 1
    for n in shape:
        count *= n
    return count


def is_large(shape: Shape | None) -> bool:
    return shape is not None and elements(shape) >= LARGE


def build(c: Case, variant: str) -> Any:
    """Input(s) -> _mul_scalar -> the operator -> _mul_scalar for each output."""
    nodes: list[dict[str, Any]] = []

    def emit(op: str, name: str, inputs: Sequence[tuple[int, int]] = (), **attrs: str) -> int:
        links = [[i, k, 0] for i, k in inputs]
        nodes.append({"op": op, "name": name, "inputs": links, "attrs": attrs})
        return len(nodes) - 1

    large = [i for i, shape in enumerate(c.shapes) if is_large(shape)]
    inputs: dict[int, int] = {}
    for i, shape in reversed(list(enumerate(c.shapes))):
        if "chained" in variant and i in large and shape == (*c.shapes, None)[i + 1]:
            source = inputs[i + 1]
        else:
            source = emit("null", "x%d" % i)
        made = large[:1] if "first" in variant else large[-1:] if "last" in variant else large
        if i in made:
            source = emit("_mul_scalar", "from%d" % i, [(source, 0)], scalar="2")
        inputs[i] = source
    index = emit(c.op, "f", [(inputs[i], 0) for i in range(len(c.shapes))], **c.attrs)
    outputs = [(index, k) for k in range(visible_outputs(nodes))]
    heads = []
    for i, k in outputs:
        if "shared" in variant:
            side = emit("_mul_scalar", "side%d" % k, [(emit("null", "s%d" % k), 0)], scalar="2")
            heads.append((emit("add_n", "to%d" % k, [(i, k), (side, 0)], num_args="2"), 0))
        else:
            heads.append((emit("_mul_scalar", "to%d" % k, [(i, k)], scalar="2"), 0))
    if "input" in variant and "kept" in variant:
        heads += [(inputs[i], 0) for i in large]
    if "output" in variant:
        heads += outputs
    return json_symbol(nodes, [[i, k, 0] for i, k in heads])


def bind(c: Case, variant: str) -> str:
    symbol = build(c, variant)
    arguments, aux = symbol.list_arguments(), symbol.list_auxiliary_states()
    known = {"x%d" % i: shape for i, shape in enumerate(c.shapes) if shape is not None}
    known = {name: shape for name, shape in known.items() if name in arguments}
    shapes, _, aux_shapes = symbol.infer_shape(**known)
    types = symbol.infer_type(**{n: "float32" for n in arguments if n.startswith("x")})[0]

    def lazy(shape: Shape, dtype: Any = "float32") -> Any:
        return mx.nd.NDArray(mx.nd.ndarray._new_alloc_handle(shape, mx.cpu(), True, dtype))

    args = {name: lazy(*rest) for name, *rest in zip(arguments, shapes, types)}
    states = {name: lazy(shape) for name, shape in zip(aux, aux_shapes)}
    grads = {}
    if "train" in variant:
        want = [name for name in arguments if is_large(args[name].shape)] or arguments
        grads = {name: lazy(args[name].shape, args[name].dtype) for name in want}
    reqs = {name: "write" if name in grads else "null" for name in arguments}
    return str(symbol.bind(mx.cpu(), args, grads, reqs, states).debug_str())


def bind_all() -> None:
    """Write, for each case and variant, what MXNet logs and says to stderr."""

    def say(text: str) -> None:
        os.write(2, (text + "\n").encode())

    for name, c in zip(NAMES, CASES):
        for variant in VARIANTS:
            say(f"CASE {name}|{variant}")
            try:
                say("DEBUG\n" + bind(c, variant))
            except Exception as error:
                say("FAILED {}".format(str(error).replace("\n", " ")[:300]))


# ------------------------------------------------------------------ in the test: read and replay


class Node(NamedTuple):
    name: str
    op: str
    attrs: dict[str, str]
    inputs: list[int]  # entries
    outputs: list[int]


class Observed(NamedTuple):
    nodes: list[Node]
    shapes: dict[int, Shape]  # of each entry
    itemsize: dict[int, int]
    heads: list[int]  # entries that are the network's outputs
    gradients: list[int]  # entries that are written to the caller's arrays
    total: int  # MB


def read_log(log: str) -> Observed:
    """Nodes and entries; entries are numbered in node order."""
    seen = Observed([], {}, {}, [], [], 0)
    position = 0
    for line in log.splitlines():
        node = re.search(r"exec_utils\.h:\d+: node \d+ (\S+)$", line)
        entry = re.search(r"\t(input|output) (\d+): (\[.*\]|None) \((\d+) KB\)", line)
        if node:
            seen.nodes.append(Node("", node.group(1), {}, [], []))
            if node.group(1) == "var":
                seen.nodes[-1].outputs.append(position)
                position += 1
        elif entry:
            which, index = entry.group(1), int(entry.group(2))
            shape = tuple(int(n) for n in re.findall(r"\d+", entry.group(3)))
            kilobytes = int(entry.group(4))
            seen.shapes[index] = shape
            seen.itemsize[index] = kilobytes * 1024 // elements(shape) if kilobytes >= 64 else 4
            (seen.nodes[-1].inputs if which == "input" else seen.nodes[-1].outputs).append(index)
            position += which == "output"
    return seen


def parse(text: str, variant: str) -> Observed:
    """Put together what the log and ``debug_str`` say; both list the nodes in the same order."""
    log, debug = text.split("DEBUG\n")
    seen = read_log(log)
    index, part = -1, ""
    outputs: list[tuple[str, int]] = []
    for line in debug.splitlines():
        head = re.match(r"\toutput\[\d+\]=(.*)\((\d+)\)$", line)
        if head:
            outputs.append((head.group(1), int(head.group(2))))
        elif line.startswith(("Variable:", "Op:")):
            index += 1
            op, name = re.sub("^Variable:", "Op:var, Name=", line)[len("Op:") :].split(", Name=")
            assert op == seen.nodes[index].op
            seen.nodes[index] = seen.nodes[index]._replace(name=name)
        elif line in ("Inputs:", "Attrs:", "Control deps:"):
            part = line
        elif line.startswith("\t") and part == "Attrs:":
            key, value = line[1:].split("=", 1)
            seen.nodes[index].attrs[key] = value
    heads = []
    for i, (name, k) in enumerate(outputs):  # the gradients of add_n are nodes without a name
        same = [node for node in seen.nodes if node.name == name]
        again = outputs[:i].count((name, k)) if name == "" else 0
        heads.append(same[again].outputs[k])
    forward = sum(1 for name, _ in outputs if re.match(r"(to|from|x)\d+$|f$", name))
    total = re.search(r"^Total (\d+) MB allocated", debug, re.M)
    assert total
    gradients = heads[forward:] if "train" in variant else []
    return seen._replace(heads=heads, gradients=gradients, total=int(total.group(1)))


Options = Tuple[Tuple[int, int, bool], ...]


def replay(seen: Observed, instead: dict[str, Options] | None = None) -> int:
    """Megabytes that MXAllocMemory (src/nnvm/plan_memory.cc) allocates, with our tables."""
    instead = instead or {}
    references: dict[int, int] = {}
    ignored: list[tuple[int, ...]] = []
    for node in seen.nodes:
        ignored.append(ignored_inputs(node.op))
        for i, entry in enumerate(node.inputs):
            references[entry] = references.get(entry, 0) + (i not in ignored[-1])
    for entry in seen.heads:
        references[entry] = references.get(entry, 0) + 1
    external = -1
    block: dict[int, int] = dict.fromkeys(seen.gradients, external)
    size: list[int] = []  # of each block
    count: list[int] = []  # references to each block
    free: list[tuple[int, int, int]] = []  # size, order of release, block
    released = 0

    def release(b: int) -> None:
        nonlocal released
        released += 1
        insort(free, (size[b], released, b))

    def request(wanted: int) -> int:
        middle = bisect_left(free, (wanted,))
        last = bisect_right(free, (wanted * 16, float("inf")))
        first = bisect_left(free, (wanted // 16,))
        if middle < last:
            b = free.pop(middle)[2]
        elif first < middle:
            b = free.pop(middle - 1)[2]
        else:
            size.append(wanted)
            count.append(0)
            return len(size) - 1
        size[b] = max(size[b], wanted)
        return b

    for node, skip in zip(seen.nodes, ignored):
        if node.op == "var":
            block[node.outputs[0]] = external
            continue
        options = instead.get(node.op)
        if options is None:
            options = inplace_options(node.op, node.attrs, len(node.inputs))
        assert options is not None, f"{node.op} is not in the tables"
        taken = set()
        for i, k, identity in options:
            source, target = node.inputs[i], node.outputs[k]
            b = block[source]
            same_size = elements(seen.shapes[source]) == elements(seen.shapes[target])
            same_type = seen.itemsize[source] == seen.itemsize[target]
            may = b >= 0 and (
                (identity and same_size and same_type)
                or (count[b] == 1 and len(skip) < len(node.inputs))
            )
            if i in taken or target in block or not references.get(target) or not may:
                continue
            if same_size and same_type:
                taken.add(i)
                block[target] = b
                count[b] += references[target]
        rest = [entry for entry in node.outputs if entry not in block]
        for entry in sorted(rest, key=lambda e: (elements(seen.shapes[e]), e), reverse=True):
            block[entry] = request(4 * elements(seen.shapes[entry]))
            count[block[entry]] = references.get(entry, 0)
        for i, entry in enumerate(node.inputs):
            b = block[entry]
            if i not in skip and b >= 0:
                count[b] -= 1
                if count[b] == 0:
                    release(b)
        for entry in node.outputs:
            if block[entry] >= 0 and count[block[entry]] == 0:
                release(block[entry])
    return sum(size) >> 20


@pytest.fixture(scope="module")
def plans() -> dict[tuple[str, str], str]:
    """What the subprocess said, for each case and variant."""
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MXNET_MEM_PLAN_VERBOSE_LOGGING": "1",
        "MXNET_SUBGRAPH_BACKEND": "NONE",
        "MXNET_SUBGRAPH_VERBOSE": "0",
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
    }
    for name in ("NNVM_EXEC_MATCH_RANGE", "NNVM_AUTO_SEARCH_MATCH_RANGE", "NNVM_EXEC_NUM_TEMP"):
        env.pop(name, None)
    done = subprocess.run(
        [sys.executable, os.path.abspath(__file__)],
        env=env,
        stderr=subprocess.PIPE,
        timeout=300,
        check=True,
    )
    parts = done.stderr.decode().split("CASE ")[1:]
    said = {}
    for part in parts:
        title, text = part.split("\n", 1)
        name, variant = title.split("|")
        said[name, variant] = text
    return said


def read(plans: dict[tuple[str, str], str], name: str) -> list[Observed]:
    """The plans of a case; an operator without gradient has only that of the forward graph."""
    found = []
    for variant in VARIANTS:
        text = plans[name, variant]
        if "\nFAILED" in "\n" + text:
            assert "train" in variant and "non-differentiable" in text, text
        else:
            found.append(parse(text, variant))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_total(plans: dict[tuple[str, str], str], name: str) -> None:
    seen = read(plans, name)
    assert [replay(s) for s in seen] == [s.total for s in seen]


# Operators without a pair for which no graph here would show one.
UNSEEN = """
    zeros_like ones_like _contrib_arange_like _random_uniform_like _random_normal_like
    CTCLoss _linalg_det _linalg_slogdet
"""  # they ignore their input; only their hidden outputs are as large as an input
DIFFERENT_SIZES = """
    Correlation _backward_Correlation _backward_MakeLoss _backward__contrib_MultiBoxTarget
    _backward__contrib_MultiProposal _backward__contrib_PSROIPooling _backward__contrib_Proposal
    _backward_contrib_bipartite_matching _backward_contrib_box_iou _backward_diag
    _contrib_MultiBoxDetection _contrib_MultiBoxPrior _contrib_MultiBoxTarget
    _contrib_MultiProposal _contrib_PSROIPooling _contrib_Proposal _contrib_bipartite_matching
    _contrib_box_iou _contrib_interleaved_matmul_selfatt_qk _random_gamma _random_uniform
    _ravel_multi_index _zeros_without_dtype diag shape_array size_array softmax_cross_entropy
"""  # no output is as large as an input, or there is no input
# Pairs whose loss no graph here shows, another pair of the operator taking their place.
UNSEEN_PAIRS = """
    _backward_broadcast_sub:0:0 _backward_cbrt:0:0 _backward_erfinv:0:0
    _backward_log_softmax:0:0 _backward_log_softmax:2:0 _backward_pdf_gamma:2:1
    _backward_pdf_gamma:3:2 _backward_pdf_poisson:2:1 _backward_pdf_uniform:2:1
    _backward_pdf_uniform:3:2 _backward_relu:0:0 _backward_rpower_scalar:0:0
    _backward_sigmoid:0:0 _backward_softmax:0:0 _backward_softmax:2:0 _backward_softmax:2:1
    _backward_softmax:3:0 _backward_softmin:0:0 _backward_sqrt:0:0 _backward_sub:0:0
    _backward_tan:0:0 _backward_tanh:0:0
"""


def test_tables_matter(plans: dict[tuple[str, str], str]) -> None:
    """With another entry for an operator, some total would not be what MXNet says."""
    shown: dict[str, bool] = {}  # operator, or operator and pair: would it be seen?
    operators = set()
    for name in NAMES:
        for seen in read(plans, name):
            for node in {node.op: node for node in seen.nodes if node.op != "var"}.values():
                operators.add(node.op)
                for key, wrong in wrong_options(seen, node):
                    if not shown.get(key):
                        shown[key] = replay(seen, {node.op: wrong}) != seen.total
    unseen = {key for key, seen in shown.items() if not seen}
    assert unseen == set((UNSEEN + UNSEEN_PAIRS).split())
    assert operators - {key.split(":")[0] for key in shown} == set(DIFFERENT_SIZES.split())


def wrong_options(seen: Observed, node: Node) -> Iterator[tuple[str, Options]]:
    """One pair less; or, for an operator without, a pair of input and output of one size."""
    options = inplace_options(node.op, node.attrs, len(node.inputs)) or ()
    for pair in options:
        yield "%s:%d:%d" % (node.op, *pair[:2]), tuple(p for p in options if p != pair)
    for i, source in enumerate(node.inputs):
        for k, target in enumerate(node.outputs):
            size = elements(seen.shapes[source])
            if not options and size >= LARGE and size == elements(seen.shapes[target]):
                yield node.op, ((i, k, False),)


@pytest.mark.parametrize("name", NAMES)
def test_hidden_outputs(plans: dict[tuple[str, str], str], name: str) -> None:
    """All outputs are read, with the shapes that the plan logs."""
    c = CASES[NAMES.index(name)]
    seen = parse(plans[name, "forward"], "forward")
    node = next(n for n in seen.nodes if n.name == "f")
    names = ["x%d" % i for i in range(len(c.shapes))]
    nodes: list[dict[str, Any]] = [{"op": "null", "name": x, "inputs": []} for x in names]
    links = [[i, 0, 0] for i in range(len(names))]
    nodes.append({"op": c.op, "name": "f", "inputs": links, "attrs": c.attrs})
    symbol = json_symbol(nodes, [[len(links), 0, 0]])
    shapes = {x: seen.shapes[entry] for x, entry in zip(names, node.inputs)}
    graph = forward_graph(symbol, read_shapes(symbol, shapes, {}, None))
    assert [tensor.shape for tensor in graph.tensors[-1]] == [seen.shapes[e] for e in node.outputs]
    assert len(graph.output_names[-1]) == visible_outputs(nodes)


def test_unlisted_and_aliases() -> None:
    assert inplace_options("sgd_mom_update", {}, 3) is None
    assert inplace_options("_foreach", {}, 3) is None
    assert inplace_options("ElementWiseSum", {"num_args": "2"}, 2) == ((0, 0, False),)


if __name__ == "__main__":
    bind_all()
