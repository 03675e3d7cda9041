"""Networks of gluoncv and gluonnlp train by plans to the bits of ``hybridize()``."""

from __future__ import annotations

import random
from typing import Any

import pytest

import memonger  # noqa: F401  before mxnet
import mxnet as mx
import numpy as np
from mxnet import autograd

from blocks import LOSS, Arrays, Prepare, initialized
from scenarios import Scenario, train, unlike_plain

pytestmark = pytest.mark.zoo  # gluoncv and gluonnlp are imported where they are used


ADAM: Any = {"optimizer": "adam", "learning_rate": 1e-3}
ENCODER: Any = {"units": 32, "hidden_size": 64, "num_layers": 4, "num_heads": 4, "max_length": 16}


def drawn(k: int, *arrays: Any) -> Any:
    """Build a batch: what these functions of a random generator draw, the label last."""
    draw = np.random.RandomState(k)
    *inputs, label = [mx.nd.array(array(draw)) for array in arrays]
    return inputs, label


def cifar_resnet(prepare: Prepare) -> Arrays:
    from gluoncv.model_zoo import get_model

    net = prepare(initialized(get_model("cifar_resnet20_v1", classes=10)))

    def pictures(k: int) -> Any:
        return drawn(k, lambda d: d.randn(8, 3, 32, 32), lambda d: d.randint(0, 10, 8))

    return train(net, lambda x, y, k: LOSS(net(*x), y), batches=pictures, wd=1e-4)


def ssd(prepare: Prepare) -> Arrays:
    """Train as gluoncv's ``train_ssd.py`` does: each anchor learns a class and a box."""
    from gluoncv.data.batchify import Stack, Tuple
    from gluoncv.data.transforms.presets.ssd import SSDDefaultTrainTransform
    from gluoncv.loss import SSDMultiBoxLoss
    from gluoncv.model_zoo import get_model

    random.seed(0)  # the transform draws from it
    options = {"classes": ["a", "b", "c"], "pretrained": False, "pretrained_base": False}
    net = get_model("ssd_512_mobilenet1.0_custom", **options)
    net.initialize()
    prepare(net)
    size, draw, loss_of = 256, np.random.RandomState(0), SSDMultiBoxLoss()
    with autograd.train_mode():
        anchors = net(mx.nd.zeros((1, 3, size, size)))[2]
    transform = SSDDefaultTrainTransform(size, size, anchors)

    def pictures(k: int) -> Any:
        items = []
        for _ in range(2):
            corners = draw.randint(0, size // 2, (3, 2))
            others = corners + draw.randint(size // 8, size // 2, (3, 2))
            label = np.hstack([corners, others, draw.randint(0, 3, (3, 1))]).astype("float32")
            items.append(transform(mx.nd.array(draw.randint(0, 255, (size, size, 3))), label))
        x, *labels = Tuple(Stack(), Stack(), Stack())(items)
        return x.as_in_context(mx.cpu()), [array.as_in_context(mx.cpu()) for array in labels]

    def loss(x: Any, y: Any, k: int) -> Any:
        classes, boxes, _ = net(x)
        total, *_ = loss_of([classes], [boxes], *([label] for label in y))
        return total

    left = train(net, loss, 5, batches=pictures, backward=autograd.backward, learning_rate=0.016)
    zeros = [name for name in left if name.endswith("grad") and not left[name].any()]
    assert len(zeros) < 20  # some layers have anchors that no box is near
    return left


def bert(prepare: Prepare) -> Arrays:
    from gluonnlp.model import BERTEncoder, BERTModel

    sizes = {"vocab_size": 50, "token_type_vocab_size": 2, "units": 32, "embed_size": 32}
    encoder = BERTEncoder(**ENCODER, dropout=0.1)
    net = prepare(initialized(BERTModel(encoder, **sizes, use_decoder=False)))
    ranges = (0, 50, (4, 12)), (0, 2, (4, 12)), (3, 13, 4), (0, 2, 4)

    def sentences(k: int) -> Any:
        return drawn(k, *(lambda d, r=r: d.randint(*r) for r in ranges))

    return train(net, lambda x, y, k: LOSS(net(*x)[-1], y), batches=sentences, **ADAM)


@pytest.mark.parametrize("network", [cifar_resnet, ssd, bert])
def test_a_plan_changes_no_bit_of_a_network_of_others(network: Scenario) -> None:
    assert unlike_plain(network) == {}
