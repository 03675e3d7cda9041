"""Outputs that ``Symbol.list_outputs`` does not show: a BatchNorm's mean, the mask of a Dropout.

MXNet's memory planner allocates them like any other, and has no Python interface to them. So their
shapes and types stand here, with the source files of 1.9.1 below ``src/operator`` that infer them
(``FNumVisibleOutputs``, ``FInferShape``, ``FInferType``). ``tests/graph/test_inplace.py`` compares
them with what MXNet plans.
"""

from __future__ import annotations

import re
from typing import Sequence

from memonger.graph.operators.inplace import Attrs, canonical, pooling_workspace
from memonger.graph.operators.tensors import Tensor


def hidden_outputs(
    op: str, attrs: Attrs, inputs: Sequence[Tensor], outputs: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    """Return the outputs that ``Symbol.list_outputs`` does not show, which come after the others.

    Parameters
    ----------
    op, attrs
        As in `inplace.inplace_options`.
    inputs : sequence of Tensor
        Auxiliary states included.
    outputs : sequence of Tensor
        Those that are shown.

    Examples
    --------
    >>> hidden_outputs("Dropout", {}, [Tensor((4, 8), "float32")], [Tensor((4, 8), "float32")])
    (Tensor(shape=(4, 8), dtype='float32'),)
    """
    name = canonical(op)
    found = _of_layers(name, attrs, inputs, outputs) or _of_others(name, attrs, inputs, outputs)
    return tuple(found[len(outputs) - 1 :])


# Both give all outputs after the first: a parameter such as output_mean_var may show some of them.


def _of_layers(
    op: str, attrs: Attrs, ins: Sequence[Tensor], outs: Sequence[Tensor]
) -> list[Tensor]:
    """Normalisations, Dropout and pooling."""
    shape, dtype = ins[0] if ins else ((), "")
    if op == "BatchNorm":  # nn/batch_norm.cc: mean and variance
        return [ins[1], ins[1]]
    if op == "_contrib_BatchNormWithReLU":  # contrib/batch_norm_relu.cc: and a workspace
        return [ins[1], ins[1], ins[0]]
    if op in ("BatchNorm_v1", "_contrib_SyncBatchNorm"):  # *-inl.h: mean and variance
        return [Tensor(shape[1:2], dtype)] * 2
    if op == "InstanceNorm":  # instance_norm-inl.h: mean and variance
        return [Tensor(shape[:2], dtype)] * 2
    if op == "GroupNorm":  # nn/group_norm.cc: mean and deviation
        return [Tensor((shape[0], int(attrs.get("num_groups", "1"))), dtype)] * 2
    if op == "LayerNorm":  # nn/layer_norm.cc: mean and deviation
        axis = int(attrs.get("axis", "-1")) % len(shape)
        return [Tensor((*shape[:axis], 1, *shape[axis + 1 :]), dtype)] * 2
    if op == "L2Normalization":  # l2_normalization-inl.h: norm
        per_pixel, per_channel = (shape[0], 1, *shape[2:]), shape[:2]
        modes = {"channel": per_pixel, "spatial": per_channel, "instance": shape[:1]}
        return [Tensor(modes[attrs.get("mode", "instance")], dtype)]
    if op in ("LRN", "CTCLoss"):  # nn/lrn.cc: sums of squares; nn/ctc_loss-inl.h: gradient
        return [ins[0]]
    if op == "Dropout":  # nn/dropout.cc: mask, shared along axes
        axes = {int(axis) % len(shape) for axis in re.findall(r"-?\d+", attrs.get("axes", ""))}
        return [Tensor(tuple(1 if i in axes else size for i, size in enumerate(shape)), dtype)]
    # nn/pooling.cc: MKLDNN's workspace; roi_pooling-inl.h: places of the maxima
    if op == "ROIPooling" or (op == "Pooling" and pooling_workspace(attrs)):
        return [Tensor(outs[0].shape, "int32")]
    return []


def _of_others(
    op: str, attrs: Attrs, ins: Sequence[Tensor], outs: Sequence[Tensor]
) -> list[Tensor]:
    """Operators of detection and flow, linear algebra, sorting."""
    shape, dtype = outs[0]
    if op == "_contrib_DeformablePSROIPooling":  # contrib/deformable_psroi_pooling-inl.h: counts
        return [outs[0]]
    # contrib/proposal-inl.h, multi_proposal-inl.h: scores; bounding_box-inl.h: sources
    if op in ("_contrib_Proposal", "_contrib_MultiProposal", "_contrib_box_nms"):
        return [Tensor((*shape[:-1], 1), dtype)]
    if op == "BilinearSampler":  # bilinear_sampler-inl.h: the grid, transposed
        (batch, _, height, width), dtype = ins[1]
        return [Tensor((batch, height, width, 2), dtype)]
    if op == "GridGenerator":  # grid_generator-inl.h: coordinates of the target
        warp, (height, width) = attrs["transform_type"] == "warp", shape[2:]
        return [Tensor((2, height, width) if warp else (3, height * width), dtype)]
    if op == "SpatialTransformer":  # spatial_transformer-inl.h: of target and source
        batch, _, height, width = shape
        return [Tensor((3, height * width), dtype), Tensor((batch, 2, height * width), dtype)]
    if op == "Correlation":  # correlation-inl.h: padded copies of both inputs
        (batch, channels, height, width), dtype = ins[0]
        pad = 2 * int(attrs.get("pad_size", "0"))
        return [Tensor((batch, height + pad, width + pad, channels), dtype)] * 2
    if op in ("_linalg_det", "_linalg_slogdet"):  # tensor/la_op.h: LU factors and pivots
        return [*outs[1:], ins[0], Tensor(ins[0].shape[:-1], "int32")]
    # tensor/ordering_op-inl.h: indices, in wheels without large tensors
    if op == "sort" or (op == "topk" and attrs.get("ret_typ") in ("value", "both")):
        return [Tensor(shape, "int32")]
    return []
