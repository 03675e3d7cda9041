"""Layouts of the outputs of MKLDNN's operators, and operators that round alike in all layouts.

On a CPU a convolution writes its output in blocks of 8 or 16 channels (see ``costs.layouts``).
"""

from __future__ import annotations

import ast
from typing import Sequence

from memonger.graph.operators.inplace import reads_overwritten
from memonger.graph.operators.tensors import Attributes, Tensor

#: Operators that compute in the layout of their inputs (``TIsMKLDNN`` in MXNet's source).
LAYOUT_AWARE = frozenset(
    """
    Activation BatchNorm Concat Convolution Deconvolution Flatten FullyConnected LRN LeakyReLU
    Pooling RNN Reshape SoftmaxOutput _contrib_BatchNormWithReLU _copy add_n amp_cast amp_multicast
    elemwise_add expand_dims log_softmax slice softmax transpose _backward_Activation
    _backward_BatchNorm _backward_Concat _backward_Convolution _backward_Deconvolution
    _backward_FullyConnected _backward_LRN _backward_LeakyReLU _backward_Pooling _backward_RNN
    _backward__contrib_BatchNormWithReLU _backward__copy _backward_add _backward_add_n
    _backward_amp_cast _backward_amp_multicast _backward_contrib_BatchNormWithReLU _backward_copy
    _backward_elemwise_add _backward_log_softmax _backward_softmax
    """.split()
)
#: Operators that make blocked tensors from plain ones.
PRODUCES_BLOCKED = frozenset(
    op + name for op in ("", "_backward_") for name in ("Convolution", "Deconvolution")
)
#: Operators that make tensors of up to 4 axes plain, and leave others as they are if they are in
#: place (``src/operator/nn/mkldnn/mkldnn_reshape.cc``).
_RESHAPE = frozenset(("Flatten", "Reshape", "expand_dims"))
#: Operators whose output's layout depends on the shape of the first input.
BY_SHAPE = _RESHAPE | {"Convolution"}
#: Operators that compute nothing in place, and otherwise make a plain copy.
_COPY = frozenset(("_backward_add", "_backward_copy", "_copy"))
#: Operators that convert their inputs to a layout of their choice.
_CHOOSE = PRODUCES_BLOCKED | {"FullyConnected", "_backward_FullyConnected"}
#: Operators whose results are the same in all layouts.
_EXACT = _CHOOSE | _RESHAPE | _COPY | {"Concat", "Pooling", "_backward_Concat", "elemwise_add"}
#: Operators that compute each number by itself. Except for the kinds in `_PIECEWISE`, a number may
#: round differently if another vector instruction computes it.
_POINTWISE = frozenset(("Activation", "LeakyReLU", "_backward_Activation", "_backward_LeakyReLU"))
_PIECEWISE = frozenset(("leaky", "relu"))
#: The kinds (``act_type``) that MKLDNN computes (``SupportMKLDNNAct``, ``SupportMKLDNNLeakyRelu``).
_SUPPORTED = frozenset(("elu", "gelu", "leaky", "relu", "sigmoid", "softrelu", "tanh"))
#: Operators that MKLDNN computes along the last axis. They request an output in the layout of their
#: input, and do not get one for a blocked input (``src/operator/nn/mkldnn/mkldnn_softmax.cc``).
_SOFTMAX = frozenset(("log_softmax", "softmax"))
#: Operators that MKLDNN computes in memory of its own where MXNet has them write in place, and then
#: copies (``CreateMKLDNNMem`` without an input, ``src/operator/nn/mkldnn/mkldnn_base.cc``).
_COPYING = frozenset(
    f"_backward_{op}" for op in ("Activation", "FullyConnected", "LeakyReLU", *_SOFTMAX)
)
#: Of these, the operators that request no temporary space, so that MKLDNN allocates it for the call
#: (``TmpMemMgr::Alloc``, beside).
REQUESTS_NONE = frozenset(f"_backward_{op}" for op in _SOFTMAX)
#: Number of inputs of Pooling's gradient -> the inputs that MKLDNN reads: the input of the Pooling,
#: in whose layout it computes, and the workspace.
_POOLING_READS = {3: (1,), 5: (2, 4)}
#: Gradient -> the index of the input in whose layout MKLDNN computes it, besides that of Pooling.
_LAID_OUT_AS = {"_backward_Activation": 1, "_backward_BatchNorm": 3, "_backward_LeakyReLU": 1}
AXES = 4
#: Gradients that MKLDNN computes in a layout of its choice, from copies where inputs have another.
REORDERING = frozenset(
    ("_backward_Convolution", "_backward_Deconvolution", "_backward_FullyConnected")
    + ("_backward_Pooling", *_LAID_OUT_AS)
)
_RGB = 3  # channels of an image for which MKLDNN has kernels that read it plain


def copies_in_place(op: str, attrs: Attributes, tensor: Tensor) -> bool:
    """Return whether MKLDNN copies an output that MXNet has an operator write in place."""
    axes = len(tensor.shape)
    if op not in _COPYING or tensor.dtype != "float32" or axes == 0:
        return False
    if op in _POINTWISE:
        return axes <= AXES + 1 and attrs.get("act_type", "leaky") in _SUPPORTED
    if op == "_backward_FullyConnected":
        return axes <= AXES
    is_last = int(attrs.get("axis", "-1")) in (-1, axes - 1)
    return axes <= AXES and is_last and attrs.get("temperature", "None") == "None"


def count_reordered(
    op: str, attrs: Attributes, inputs: Sequence[Tensor], is_plain: Sequence[bool], wants_data: bool
) -> int:
    """Count the bytes that MKLDNN copies to another layout, at once, to compute a gradient.

    They are in temporary space, and the same with AVX2 and with AVX512. Of tensors of other than 4
    axes, and of unusual convolutions, they are not known.

    Parameters
    ----------
    op, attrs : str, mapping
        The gradient of an operator.
    inputs : sequence of Tensor
        What it reads.
    is_plain : sequence of bool
        Whether each of these is in the plain layout.
    wants_data : bool
        Whether it computes the gradient of the data.

    Returns
    -------
    int
        0 where it is not known, and for other operators.
    """
    # GetMKLDNNDataReorder, GetWeights and CreateMKLDNNWeightGrad, as they are called by the
    # gradients in src/operator/nn/mkldnn
    gradient, data = inputs[:2]
    tensor = data if op == "_backward_FullyConnected" else gradient
    if len(tensor.shape) != AXES or tensor.dtype != "float32":
        return 0
    if op in ("_backward_Convolution", "_backward_Deconvolution"):
        return _count_of_convolution(op, attrs, inputs, is_plain, wants_data)
    if op == "_backward_FullyConnected":
        return 0 if is_plain[1] else data.nbytes
    k = _POOLING_READS.get(len(inputs), (0,))[0] if op == "_backward_Pooling" else 0
    k = _LAID_OUT_AS.get(op, k)
    return gradient.nbytes if is_plain[0] and not is_plain[k] else 0


def _count_of_convolution(
    op: str, attrs: Attributes, inputs: Sequence[Tensor], is_plain: Sequence[bool], wants_data: bool
) -> int:
    """Count as `count_reordered` for a Convolution or a Deconvolution of tensors of `AXES` axes."""
    gradient, data, weight = (tensor.nbytes for tensor in inputs[:3])
    is_reverse, groups = op == "_backward_Deconvolution", int(attrs.get("num_group", "1"))
    channels = inputs[1].shape[1], inputs[0].shape[1]
    image, features = reversed(channels) if is_reverse else channels
    deep = Tensor((1, 16, *inputs[0 if is_reverse else 1].shape[2:]), "float32")
    is_usual = _convolution_layout({**attrs, "num_group": "1"}, deep, deep) == "usual"
    if not is_usual or (is_reverse and groups > 1):
        return 0
    if image == _RGB and groups == 1 and features % 8 == 0:
        # Of the two gradients of a Convolution one reads plain and one blocks, needed or not.
        return weight * (1 + wants_data) + data * is_plain[1] if is_reverse else weight + gradient
    if any(k % 8 or (k // groups % 8 and k != groups) for k in channels):
        return gradient * (not is_plain[0]) + data * (not is_plain[1])  # by products of matrices
    if groups > 1 and groups == image and _tuple(attrs, "kernel") != (3, 3):
        # Of one channel a group: the gradient of the data is made in blocks, the other is not.
        return gradient + weight * wants_data + data * (not is_plain[1])
    # That of the weight is made in blocks; that of groups is then laid out twice.
    copied = weight * (1 + (groups > 1) + wants_data)
    return copied + gradient * is_plain[0] + data * is_plain[1]


def layout_of_output(
    op: str, attrs: Attributes, inputs: int, tensor: Tensor, k: int, data: Tensor | None
) -> str:
    """Return how output ``k``, a ``tensor``, gets its layout; ``data`` is the first input.

    ``costs/layouts.h`` defines the words. 'usual' is the usual blocked layout, 'chosen' a layout
    that does not depend on those of the inputs, 'other' one that does. With 'in_place' it depends
    on them too, and the operator crashes on a blocked input that it does not overwrite.
    """
    axes = len(tensor.shape)
    if op not in LAYOUT_AWARE or tensor.dtype != "float32" or op == "_backward_Concat":
        return "keeps"
    if op in _RESHAPE:
        return "always_plain" if len((data or tensor).shape) <= AXES else "keeps"
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
        return _convolution_layout(attrs, tensor, data) if op == "Convolution" else "chosen"
    if op in _SOFTMAX and int(attrs.get("axis", "-1")) in (-1, axes - 1):
        return "in_place"
    if k == 0 and axes == AXES:
        if op in ("BatchNorm", "_backward_BatchNorm") and attrs.get("axis", "1") == "1":
            return "passes" if op == "BatchNorm" else "norm_gradient"
        if op == "_backward_Pooling" and inputs in _POOLING_READS:
            return "other" if _overlap(attrs) or _whole(attrs, tensor) else "pooling_gradient"
        pool = attrs.get("pool_type", "max")
        valid = attrs.get("pooling_convention", "valid") == "valid"
        if op == "Pooling" and (pool == "max" or (pool == "avg" and valid)):
            return "passes"
    return "other"


def layouts_of_inputs(
    op: str, attrs: Attributes, inputs: int
) -> tuple[Sequence[bool], Sequence[bool]]:
    """Return for each input whether results, and whether output layouts, depend on its layout."""
    if reads_overwritten(op, attrs):
        return [p == 0 for p in range(inputs)], [False] * inputs
    if op == "_backward_Pooling":
        plays = [p in _POOLING_READS.get(inputs, range(inputs)) for p in range(inputs)]
        # In a blocked layout, overlapping windows are summed in another order (seen with AVX2).
        return plays if _overlap(attrs) else [False] * inputs, plays
    exact = op in _EXACT or (op == "add_n" and inputs <= 2)
    exact |= op in _POINTWISE and attrs.get("act_type", "leaky") in _PIECEWISE
    return [not exact] * inputs, [op not in _CHOOSE] * inputs


def _overlap(attrs: Attributes) -> bool:
    """Return whether windows of a Pooling overlap."""
    kernel, stride = _tuple(attrs, "kernel"), _tuple(attrs, "stride")
    whole = attrs.get("global_pool", "False") != "False"
    return not whole and any(s < k for k, s in zip(kernel, stride or (1,) * len(kernel)))


def _whole(attrs: Attributes, image: Tensor) -> bool:
    """Return whether a Pooling computes one number from each channel of an image.

    All blocked layouts of such an output are equal, and oneDNN may choose another one for its
    gradient (seen with ``DNNL_VERBOSE=1``: acdB8b).
    """
    if attrs.get("global_pool", "False") != "False":
        return True
    kernel, ones = _tuple(attrs, "kernel"), (1, 1)
    spans = zip(image.shape[2:], kernel, _tuple(attrs, "stride", *ones), _tuple(attrs, "pad", 0, 0))
    return all(size + 2 * pad - width < stride for size, width, stride, pad in spans)


def _tuple(attrs: Attributes, name: str, *default: int) -> tuple[int, ...]:
    return tuple(ast.literal_eval(attrs.get(name, "()"))) or default


def _convolution_layout(attrs: Attributes, tensor: Tensor, data: Tensor | None) -> str:
    """Return the layout of a convolution's output: 'usual' where most convolutions use the same.

    ``DNNL_VERBOSE=1`` has shown the layouts of thousands of convolutions, on CPUs with AVX2 and
    with AVX512 (``tests/costs/test_layouts.py``).
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
        and (data.shape[1] % 16 == 0 or data.shape[1] == _RGB)
        and max(kernel) <= 7
        and max(_tuple(attrs, "stride", 1)) <= 2
        and _tuple(attrs, "dilate", 1, 1) == (1, 1)
        and all(2 * p < width <= size for p, width, size in zip(pad, kernel, data.shape[2:]))
    )
    return "usual" if usual else "chosen"
