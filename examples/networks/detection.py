"""Networks that find objects, with operators written in Python."""

from typing import Any, List, Sequence, Tuple

from .common import Network, Shape, conv_bn_relu, freshly_named
import mxnet as mx
import numpy as np


class HardSwish(mx.operator.CustomOp):
    """x * clip(x / 6 + 1/2, 0, 1), on NDArrays."""

    def forward(
        self,
        is_train: bool,
        req: List[str],
        in_data: List[Any],
        out_data: List[Any],
        aux: List[Any],
    ) -> None:
        x = in_data[0]
        self.assign(out_data[0], req[0], x * mx.nd.clip(x / 6 + 0.5, 0, 1))

    def backward(
        self,
        req: List[str],
        out_grad: List[Any],
        in_data: List[Any],
        out_data: List[Any],
        in_grad: List[Any],
        aux: List[Any],
    ) -> None:
        x = in_data[0]
        inside = (x > -3) * (x < 3)
        slope = inside * (x / 3 + 0.5) + (x >= 3)
        self.assign(in_grad[0], req[0], out_grad[0] * slope)


@mx.operator.register("hard_swish")
class HardSwishProp(mx.operator.CustomOpProp):
    """What MXNet asks of ``Custom(op_type='hard_swish')``; shapes and types are the defaults'.

    It takes no keywords, as most custom operators: a foreign attribute on the node is an error.
    """

    def __init__(self) -> None:
        super().__init__(need_top_grad=True)

    def create_operator(
        self, ctx: Any, in_shapes: Sequence[Shape], in_dtypes: Sequence[Any]
    ) -> HardSwish:
        return HardSwish()


def _predict(x: Any, values: int) -> Any:
    """Predict `values` numbers for every pixel, flattened with the pixels outermost."""
    x = mx.sym.Convolution(x, num_filter=values, kernel=(3, 3), pad=(1, 1))
    return mx.sym.Flatten(mx.sym.transpose(x, (0, 2, 3, 1)))


@freshly_named
def detection(
    batch: int = 8,
    image: int = 256,
    classes: int = 20,
    objects: int = 8,
    filters: int = 32,
    blocks: int = 3,
    scales: int = 3,
    custom: bool = True,
) -> Network:
    """Small SSD (Liu et al. 2015, arXiv 1512.02325): classes and boxes at several scales.

    Heads: class probabilities, the box loss, and without gradient the classes wanted and the
    objects that are found. The label has rows (class, left, top, right, bottom), in shares of the
    image; class -1 is no object. Each block and each scale halves the image. With `custom` a Python
    operator stands in the trunk.
    """
    ratios = (1, 2, 0.5)
    x = mx.sym.Variable("data")
    for block in range(blocks):
        x = conv_bn_relu(x, filters << block, stride=2)
    if custom:
        x = mx.sym.Custom(x, op_type="hard_swish", name="hard_swish")

    scores, boxes, anchors = [], [], []
    for scale in range(scales):
        if scale > 0:
            x = conv_bn_relu(x, filters << blocks, stride=2)
        sizes = tuple((scale + extra) / scales * 0.7 + 0.2 for extra in (0, 0.5))
        per_pixel = len(sizes) + len(ratios) - 1
        scores.append(_predict(x, (classes + 1) * per_pixel))
        boxes.append(_predict(x, 4 * per_pixel))
        prior = mx.sym.contrib.MultiBoxPrior(x, sizes=sizes, ratios=ratios)
        anchors.append(mx.sym.Flatten(prior))
    score = mx.sym.reshape(mx.sym.Concat(*scores, dim=1), (0, -1, classes + 1))
    score = mx.sym.transpose(score, (0, 2, 1))
    box = mx.sym.Concat(*boxes, dim=1)
    anchor = mx.sym.reshape(mx.sym.Concat(*anchors, dim=1), (0, -1, 4))

    box_wanted, box_mask, class_wanted = mx.sym.contrib.MultiBoxTarget(
        anchor,
        mx.sym.Variable("label"),
        score,
        overlap_threshold=0.5,
        ignore_label=-1,
        negative_mining_ratio=3,
        negative_mining_thresh=0.5,
        name="target",
    )
    class_loss = mx.sym.SoftmaxOutput(
        score,
        class_wanted,
        ignore_label=-1,
        use_ignore=True,
        multi_output=True,
        normalization="valid",
        name="class_prob",
    )
    distance = mx.sym.smooth_l1(box_mask * (box - box_wanted), scalar=1.0)
    seen = mx.sym.contrib.MultiBoxDetection(class_loss, box, anchor, name="detection")
    heads = [
        class_loss,
        mx.sym.MakeLoss(distance, normalization="valid", name="box_loss"),
        mx.sym.BlockGrad(class_wanted, name="class_label"),
        mx.sym.MakeLoss(seen, grad_scale=0, name="objects"),
    ]
    shapes = {"data": (batch, 3, image, image), "label": (batch, objects, 5)}
    return mx.sym.Group(heads), shapes


class ProposalTarget(mx.operator.CustomOp):
    """What each region is to become, in NumPy: its class, its box, and whether that counts."""

    def __init__(self, image: int) -> None:
        super().__init__()
        self.image = image

    def forward(
        self,
        is_train: bool,
        req: List[str],
        in_data: List[Any],
        out_data: List[Any],
        aux: List[Any],
    ) -> None:
        rois, objects = (array.asnumpy() for array in in_data)
        classes = np.zeros(len(rois), np.float32)  # 0 is the background
        boxes, weights = np.zeros((2, len(rois), 4), np.float32)
        for k, (number, *corners) in enumerate(rois):
            there = objects[int(number)]
            there = there[there[:, 0] >= 0]
            if not len(there):
                continue
            wanted, region = there[:, 1:] * self.image, np.array(corners)
            shared = np.minimum(wanted[:, 2:], region[2:]) - np.maximum(wanted[:, :2], region[:2])
            overlap = np.prod(np.maximum(shared, 0), axis=1)
            area = np.prod(wanted[:, 2:] - wanted[:, :2], axis=1)
            share = overlap / np.maximum(area + np.prod(region[2:] - region[:2]) - overlap, 1)
            best = int(np.argmax(share))
            if share[best] >= 0.3:
                classes[k], weights[k] = 1 + there[best, 0], 1
                boxes[k] = (wanted[best] - region) / self.image
        for k, values in enumerate((classes, boxes, weights)):
            self.assign(out_data[k], req[k], mx.nd.array(values))

    def backward(
        self,
        req: List[str],
        out_grad: List[Any],
        in_data: List[Any],
        out_data: List[Any],
        in_grad: List[Any],
        aux: List[Any],
    ) -> None:
        for k, gradient in enumerate(in_grad):
            self.assign(gradient, req[k], 0)


@mx.operator.register("proposal_target")
class ProposalTargetProp(mx.operator.CustomOpProp):
    """Regions and objects go in; a class, a box and its weight of each region come out."""

    def __init__(self, image: str) -> None:
        super().__init__(need_top_grad=False)
        self.image = int(image)

    def list_arguments(self) -> List[str]:
        return ["rois", "label"]

    def list_outputs(self) -> List[str]:
        return ["class", "box", "weight"]

    def infer_shape(self, in_shape: List[List[int]]) -> Tuple[Any, Any, Any]:
        regions = in_shape[0][0]
        return in_shape, [[regions], [regions, 4], [regions, 4]], []

    def create_operator(
        self, ctx: Any, in_shapes: Sequence[Shape], in_dtypes: Sequence[Any]
    ) -> ProposalTarget:
        return ProposalTarget(self.image)


@freshly_named
def rcnn(
    batch: int = 1,
    image: int = 512,
    classes: int = 20,
    objects: int = 8,
    filters: int = 32,
    blocks: int = 4,
    regions: int = 128,
    hidden: int = 512,
) -> Network:
    """Small Faster R-CNN (Ren et al. 2015, arXiv 1506.01497): proposes regions, classifies them.

    Heads: whether there is something in each anchor, the loss of its box, the class of each region,
    the loss of its box, and the classes wanted (without gradient). The label is as `detection` has
    it. With a batch of one the regions come from `Proposal`, otherwise from `MultiProposal`.
    """
    x = mx.sym.Variable("data")
    for block in range(blocks):
        x = conv_bn_relu(conv_bn_relu(x, filters << block, stride=2), filters << block)
    stride, side = 2**blocks, image // 2**blocks
    scales, ratios = (2, 4, 8), (0.5, 1, 2)
    anchors = len(scales) * len(ratios)

    y = mx.sym.Convolution(x, num_filter=4 * filters, kernel=(3, 3), pad=(1, 1))
    y = mx.sym.Activation(y, act_type="relu")
    score = mx.sym.Convolution(y, num_filter=2 * anchors, kernel=(1, 1))
    score = mx.sym.reshape(score, (0, 2, -1, 0))
    box = mx.sym.Convolution(y, num_filter=4 * anchors, kernel=(1, 1))
    anchor_loss = mx.sym.SoftmaxOutput(
        score, multi_output=True, use_ignore=True, normalization="valid", name="anchor"
    )
    distance = mx.sym.smooth_l1(box - mx.sym.Variable("anchor_box"), scalar=3.0)
    anchor_box_loss = mx.sym.MakeLoss(distance, normalization="batch", name="anchor_box_loss")

    propose = mx.sym.contrib.Proposal if batch == 1 else mx.sym.contrib.MultiProposal
    probability = mx.sym.reshape(mx.sym.softmax(score, axis=1), (0, 2 * anchors, -1, side))
    size = mx.sym.Concat(mx.sym.full((batch, 2), image), mx.sym.ones((batch, 1)), dim=1)
    rois = propose(
        probability,
        box,
        size,
        feature_stride=stride,
        scales=scales,
        ratios=ratios,
        rpn_pre_nms_top_n=8 * regions,
        rpn_post_nms_top_n=regions,
        rpn_min_size=stride,
        name="proposal",
    )
    target = mx.sym.Custom(
        rois, mx.sym.Variable("label"), image=image, op_type="proposal_target", name="target"
    )
    class_wanted, box_wanted, box_weight = target
    y = mx.sym.ROIPooling(x, rois, pooled_size=(4, 4), spatial_scale=1 / stride, name="pooled")
    y = mx.sym.FullyConnected(mx.sym.Flatten(y), num_hidden=hidden)
    y = mx.sym.Activation(y, act_type="relu")
    region_loss = mx.sym.SoftmaxOutput(
        mx.sym.FullyConnected(y, num_hidden=classes + 1),
        class_wanted,
        normalization="batch",
        name="region",
    )
    distance = box_weight * (mx.sym.FullyConnected(y, num_hidden=4) - box_wanted)
    distance = mx.sym.smooth_l1(distance, scalar=1.0)
    heads = [
        anchor_loss,
        anchor_box_loss,
        region_loss,
        mx.sym.MakeLoss(distance, grad_scale=1 / regions, name="region_box_loss"),
        mx.sym.BlockGrad(class_wanted, name="class_label"),
    ]
    shapes = {
        "data": (batch, 3, image, image),
        "label": (batch, objects, 5),
        "anchor_label": (batch, anchors * side, side),
        "anchor_box": (batch, 4 * anchors, side, side),
    }
    return mx.sym.Group(heads), shapes
