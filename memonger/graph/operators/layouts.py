"""In which layout MKLDNN's operators leave their outputs, and which of them round alike in all.

On the CPU a convolution writes its output in blocks of 8 or 16 channels (see ``costs.layouts``).
"""

from __future__ import annotations

import ast
from typing import Sequence

from memonger.graph.operators.inplace import expanded
from memonger.graph.operators.tensors import Attributes, Tensor

#: Operators that compute in the layout that they find: ``TIsMKLDNN`` in MXNet's source.
LAYOUT_AWARE = frozenset(
    expanded("""
        {},_backward_{}: Activation BatchNorm Concat Convolution Deconvolution FullyConnected LRN
        LeakyReLU Pooling RNN _contrib_BatchNormWithReLU _copy add_n amp_cast amp_multicast
        elemwise_add log_softmax softmax
        {}: Flatten Reshape SoftmaxOutput expand_dims slice transpose _backward_add _backward_copy
        _backward_contrib_BatchNormWithReLU
    """)
)
#: Those that make blocks of plain tensors.
PRODUCES_BLOCKED = frozenset(
    op + name for op in ("", "_backward_") for name in ("Convolution", "Deconvolution")
)
#: Those that make any layout plain, up to 4 axes (``src/operator/nn/mkldnn/mkldnn_reshape.cc``).
_RESHAPE = frozenset(("Flatten", "Reshape", "expand_dims"))
#: Those that copy in place by doing nothing, and plainly otherwise.
_COPY = frozenset(("_backward_add", "_backward_copy", "_copy"))
#: Those that bring what they read into a layout of their own choice.
_CHOOSE = PRODUCES_BLOCKED | {"FullyConnected", "_backward_FullyConnected"}
#: Those whose numbers are the same in all layouts.
_EXACT = _CHOOSE | _RESHAPE | _COPY | {"Concat", "Pooling", "_backward_Concat", "elemwise_add"}
#: One number after the other; all but `_PIECEWISE` may round as they are computed in vectors.
_POINTWISE = frozenset(("Activation", "LeakyReLU", "_backward_Activation", "_backward_LeakyReLU"))
_PIECEWISE = frozenset(("leaky", "relu"))
#: What MKLDNN computes of them (``SupportMKLDNNAct``, ``SupportMKLDNNLeakyRelu``).
_SUPPORTED = frozenset(("elu", "gelu", "leaky", "relu", "sigmoid", "softrelu", "tanh"))
#: What MKLDNN reads of the inputs of Pooling's gradient, by their number: Pooling's input (whose
#: layout decides on the computation), and the workspace.
_POOLING_READS = {3: (1,), 5: (2, 4)}
AXES = 4


def layout_of_output(
    op: str, attrs: Attributes, inputs: int, tensor: Tensor, k: int, data: Tensor | None
) -> str:
    """Tell how the layout of output ``k``, a ``tensor``, comes about; ``data`` is the first input.

    ``costs.layouts.layout_of`` says what the words mean: 'usual' are the usual blocks, 'chosen' is
    some layout whatever those of the inputs, 'other' some function of theirs.
    """
    axes = len(tensor.shape)
    if op not in LAYOUT_AWARE or tensor.dtype != "float32" or op == "_backward_Concat":
        return "keeps"
    if op in _RESHAPE and axes <= AXES:
        return "always_plain"
    if op in _COPY:
        return "copies"
    if op in _POINTWISE:
        return "first" if attrs.get("act_type", "leaky") in _SUPPORTED else "keeps"
    if axes <= 2:  # MKLDNN has no blocks for them
        return "always_plain"
    if op == "elemwise_add":
        return "sums" if axes <= AXES else "keeps"
    if op == "add_n":
        return "alike"
    if op in _CHOOSE:
        return _of_convolution(attrs, tensor, data) if op == "Convolution" else "chosen"
    if k == 0 and axes == AXES:
        if op in ("BatchNorm", "_backward_BatchNorm") and attrs.get("axis", "1") == "1":
            return "passes" if op == "BatchNorm" else "norm_gradient"
        if op == "_backward_Pooling" and inputs in _POOLING_READS:
            return "other" if _overlap(attrs) else "pooling_gradient"
        pool = attrs.get("pool_type", "max")
        valid = attrs.get("pooling_convention", "valid") == "valid"
        if op == "Pooling" and (pool == "max" or (pool == "avg" and valid)):
            return "passes"
    return "other"


def layouts_of_inputs(
    op: str, attrs: Attributes, inputs: int
) -> tuple[Sequence[bool], Sequence[bool]]:
    """Tell of each input if the numbers, and the outputs' layouts, may depend on its layout."""
    if op == "_backward_Pooling":
        plays = [p in _POOLING_READS.get(inputs, range(inputs)) for p in range(inputs)]
        # Windows that overlap are added up in another order in blocks (seen with AVX2).
        return plays if _overlap(attrs) else [False] * inputs, plays
    exact = op in _EXACT or (op == "add_n" and inputs <= 2)
    exact |= op in _POINTWISE and attrs.get("act_type", "leaky") in _PIECEWISE
    return [not exact] * inputs, [op not in _CHOOSE] * inputs


def _overlap(attrs: Attributes) -> bool:
    """Tell whether windows of a Pooling have elements in common."""
    kernel, stride = _tuple(attrs, "kernel"), _tuple(attrs, "stride")
    whole = attrs.get("global_pool", "False") != "False"
    return not whole and any(s < k for k, s in zip(kernel, stride or (1,) * len(kernel)))


def _tuple(attrs: Attributes, name: str, *usual: int) -> tuple[int, ...]:
    return tuple(ast.literal_eval(attrs.get(name, "()"))) or usual


def _of_convolution(attrs: Attributes, tensor: Tensor, data: Tensor | None) -> str:
    """Tell how a convolution lays out its output, as far as that is the same for many of them.

    Seen with ``DNNL_VERBOSE=1`` in thousands of convolutions, on CPUs with AVX2 and with AVX512
    (``tests/costs/test_layouts.py``).
    """
    if data is None or len(tensor.shape) != AXES or len(data.shape) != AXES:
        return "chosen"
    channels, groups = tensor.shape[1], int(attrs.get("num_group", "1"))
    if groups > 1 and not groups == channels == data.shape[1]:
        return "chosen"
    if channels % 8 and channels > 4:
        return "always_plain"
    kernel, pad = _tuple(attrs, "kernel", 1, 1), _tuple(attrs, "pad", 0, 0)
    usual = (
        channels % 16 == 0
        and (data.shape[1] % 16 == 0 or data.shape[1] == 3)
        and max(kernel) <= 7
        and max(_tuple(attrs, "stride", 1)) <= 2
        and _tuple(attrs, "dilate", 1, 1) == (1, 1)
        and all(2 * p < width <= size for p, width, size in zip(pad, kernel, data.shape[2:]))
    )
    return "usual" if usual else "chosen"
