"""Outputs that ``Symbol.list_outputs`` does not show: a BatchNorm's mean, the mask of a Dropout.

MXNet's memory planner allocates them like any other, and has no Python interface to them. So their
shapes and types stand here as a table, an operator to an entry, with the source files of 1.9.1 that
infer them. ``tests/graph/test_inplace.py`` compares the table with what MXNet plans.
"""

from __future__ import annotations

import re
from typing import Callable, Sequence, Tuple

from memonger.graph.operators.inplace import Attrs, canonical, pooling_workspace
from memonger.graph.operators.tensors import Shape

Tensor = Tuple[Shape, str]  # shape and NumPy type name

_INT = "int32"  # type of indices in wheels, which are built without large tensors


def _integers(text: str) -> list[int]:
    return [int(n) for n in re.findall(r"-?\d+", text)]


def _layer_norm(attrs: Attrs, ins: Sequence[Tensor], outs: Sequence[Tensor]) -> list[Tensor]:
    """Mean and deviation."""
    shape, dtype = ins[0]
    axis = int(attrs.get("axis", "-1")) % len(shape)
    return [((*shape[:axis], 1, *shape[axis + 1 :]), dtype)] * 2


def _l2_norm(attrs: Attrs, ins: Sequence[Tensor], outs: Sequence[Tensor]) -> list[Tensor]:
    shape, dtype = ins[0]
    mode = attrs.get("mode", "instance")
    if mode == "channel":
        return [((shape[0], 1, *shape[2:]), dtype)]
    return [(shape[:2] if mode == "spatial" else shape[:1], dtype)]


def _dropout(attrs: Attrs, ins: Sequence[Tensor], outs: Sequence[Tensor]) -> list[Tensor]:
    """Mask, shared along ``axes``."""
    shape, dtype = ins[0]
    axes = {axis % len(shape) for axis in _integers(attrs.get("axes", ""))}
    return [(tuple(1 if i in axes else size for i, size in enumerate(shape)), dtype)]


def _column(attrs: Attrs, ins: Sequence[Tensor], outs: Sequence[Tensor]) -> list[Tensor]:
    """One number for each row of the output."""
    shape, dtype = outs[0]
    return [((*shape[:-1], 1), dtype)]


def _sampler(attrs: Attrs, ins: Sequence[Tensor], outs: Sequence[Tensor]) -> list[Tensor]:
    """Grid, transposed."""
    (batch, _, height, width), dtype = ins[1]
    return [((batch, height, width, 2), dtype)]


def _grid(attrs: Attrs, ins: Sequence[Tensor], outs: Sequence[Tensor]) -> list[Tensor]:
    """Coordinates of the target."""
    (_, _, height, width), dtype = outs[0]
    warp = attrs["transform_type"] == "warp"
    return [((2, height, width) if warp else (3, height * width), dtype)]


def _transformer(attrs: Attrs, ins: Sequence[Tensor], outs: Sequence[Tensor]) -> list[Tensor]:
    """Coordinates of target and source."""
    (batch, _, height, width), dtype = outs[0]
    return [((3, height * width), dtype), ((batch, 2, height * width), dtype)]


def _correlation(attrs: Attrs, ins: Sequence[Tensor], outs: Sequence[Tensor]) -> list[Tensor]:
    """Padded copies of both inputs."""
    (batch, channels, height, width), dtype = ins[0]
    pad = 2 * int(attrs.get("pad_size", "0"))
    return [((batch, height + pad, width + pad, channels), dtype)] * 2


def _determinant(attrs: Attrs, ins: Sequence[Tensor], outs: Sequence[Tensor]) -> list[Tensor]:
    """LU factors and pivots."""
    return [*outs[1:], ins[0], (ins[0][0][:-1], _INT)]


# All outputs after the first, hidden or not: a parameter such as output_mean_var may show them.
_FURTHER_OUTPUTS: dict[str, Callable[[Attrs, Sequence[Tensor], Sequence[Tensor]], list[Tensor]]] = {
    # src/operator/nn/batch_norm.cc, contrib/batch_norm_relu.cc (workspace): mean and variance
    "BatchNorm": lambda attrs, ins, outs: [ins[1], ins[1]],
    "_contrib_BatchNormWithReLU": lambda attrs, ins, outs: [ins[1], ins[1], ins[0]],
    # src/operator/batch_norm_v1-inl.h, contrib/sync_batch_norm-inl.h: mean and variance
    "BatchNorm_v1": lambda attrs, ins, outs: [(ins[0][0][1:2], ins[0][1])] * 2,
    "_contrib_SyncBatchNorm": lambda attrs, ins, outs: [(ins[0][0][1:2], ins[0][1])] * 2,
    # src/operator/nn/layer_norm.cc, group_norm.cc, lrn.cc; instance_norm-inl.h,
    # l2_normalization-inl.h: moments, sums of squares, norm
    "LayerNorm": _layer_norm,
    "GroupNorm": lambda attrs, ins, outs: (
        [((ins[0][0][0], int(attrs.get("num_groups", "1"))), ins[0][1])] * 2
    ),
    "LRN": lambda attrs, ins, outs: [ins[0]],
    "InstanceNorm": lambda attrs, ins, outs: [(ins[0][0][:2], ins[0][1])] * 2,
    "L2Normalization": _l2_norm,
    # src/operator/nn/dropout.cc, pooling.cc, ctc_loss-inl.h: mask, MKLDNN's workspace, gradient
    "Dropout": _dropout,
    "Pooling": lambda attrs, ins, outs: [(outs[0][0], _INT)] if pooling_workspace(attrs) else [],
    "CTCLoss": lambda attrs, ins, outs: [ins[0]],
    # src/operator/roi_pooling-inl.h, contrib/deformable_psroi_pooling-inl.h: maxima, counts
    "ROIPooling": lambda attrs, ins, outs: [(outs[0][0], _INT)],
    "_contrib_DeformablePSROIPooling": lambda attrs, ins, outs: [outs[0]],
    # src/operator/contrib/proposal-inl.h, multi_proposal-inl.h, bounding_box-inl.h: scores, sources
    "_contrib_Proposal": _column,
    "_contrib_MultiProposal": _column,
    "_contrib_box_nms": _column,
    # src/operator/bilinear_sampler-inl.h, grid_generator-inl.h, spatial_transformer-inl.h,
    # correlation-inl.h
    "BilinearSampler": _sampler,
    "GridGenerator": _grid,
    "SpatialTransformer": _transformer,
    "Correlation": _correlation,
    # src/operator/tensor/la_op.h, ordering_op-inl.h: factors and pivots, indices
    "_linalg_det": _determinant,
    "_linalg_slogdet": _determinant,
    "sort": lambda attrs, ins, outs: [(outs[0][0], _INT)],
    "topk": lambda attrs, ins, outs: (
        [(outs[0][0], _INT)] if attrs.get("ret_typ", "indices") in ("value", "both") else []
    ),
}


def may_hide_outputs(op: str) -> bool:
    """Whether `hidden_outputs` has something to say about an operator."""
    return canonical(op) in _FURTHER_OUTPUTS


def hidden_outputs(
    op: str,
    attrs: Attrs,
    in_shapes: Sequence[Shape],
    in_dtypes: Sequence[str],
    out_shapes: Sequence[Shape],
    out_dtypes: Sequence[str],
) -> tuple[Tensor, ...]:
    """Shapes and types of the outputs that ``Symbol.list_outputs`` does not show.

    Parameters
    ----------
    op, attrs
        As in `inplace.inplace_options`.
    in_shapes, in_dtypes : sequence
        Shape and NumPy type name of every input, auxiliary states included.
    out_shapes, out_dtypes : sequence
        The same of every output that is shown.

    Returns
    -------
    tuple of (shape, NumPy type name)
        In the order of the operator's outputs, after those that are shown.

    Source: ``FNumVisibleOutputs``, ``FInferShape`` and ``FInferType`` of each operator.

    Examples
    --------
    >>> hidden_outputs("Dropout", {}, [(4, 8)], ["float32"], [(4, 8)], ["float32"])
    (((4, 8), 'float32'),)
    """
    further = _FURTHER_OUTPUTS.get(canonical(op))
    if further is None:
        return ()
    ins = [(tuple(shape), dtype) for shape, dtype in zip(in_shapes, in_dtypes)]
    outs = [(tuple(shape), dtype) for shape, dtype in zip(out_shapes, out_dtypes)]
    return tuple(further(attrs, ins, outs)[len(outs) - 1 :])
