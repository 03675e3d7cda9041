"""Networks of gluoncv and gluonnlp train by plans to the bits of ``hybridize()``."""

from __future__ import annotations

import random
from typing import Any

import pytest

import memonger  # noqa: F401  before mxnet
import mxnet as mx
import numpy as np
from mxnet import autograd

from blocks import HOWS, LOSS, Arrays, Prepare, initialized, left_in, step, trainer
from scenarios import Scenarios, unlike_plain

pytestmark = pytest.mark.zoo  # gluoncv and gluonnlp are imported where they are used

SCENARIOS = Scenarios()


@SCENARIOS.add
def cifar_resnet(prepare: Prepare) -> Arrays:
    from gluoncv.model_zoo import get_model

    net = prepare(initialized(get_model("cifar_resnet20_v1", classes=10)))
    training = trainer(net, wd=1e-4)
    draw = np.random.RandomState(0)
    for _ in range(5):
        x, y = draw.randn(8, 3, 32, 32), draw.randint(0, 10, 8)
        step(net, training, mx.nd.array(x), mx.nd.array(y))
    return left_in(net)


def pictures_with_boxes(draw: Any, transform: Any, size: int) -> Any:
    """Two pictures, and the classes and boxes that each anchor is to learn."""
    from gluoncv.data.batchify import Stack, Tuple

    items = []
    for _ in range(2):
        corners = draw.randint(0, size // 2, (3, 2))
        others = corners + draw.randint(size // 8, size // 2, (3, 2))
        label = np.hstack([corners, others, draw.randint(0, 3, (3, 1))]).astype("float32")
        items.append(transform(mx.nd.array(draw.randint(0, 255, (size, size, 3))), label))
    return [each.as_in_context(mx.cpu()) for each in Tuple(Stack(), Stack(), Stack())(items)]


@SCENARIOS.add
def ssd(prepare: Prepare) -> Arrays:
    """As gluoncv's ``train_ssd.py`` trains it."""
    from gluoncv.data.transforms.presets.ssd import SSDDefaultTrainTransform
    from gluoncv.loss import SSDMultiBoxLoss
    from gluoncv.model_zoo import get_model

    random.seed(0)  # the transform draws from it
    options = {"classes": ["a", "b", "c"], "pretrained": False, "pretrained_base": False}
    net = get_model("ssd_512_mobilenet1.0_custom", **options)
    net.initialize()
    prepare(net)
    size = 256
    with autograd.train_mode():
        anchors = net(mx.nd.zeros((1, 3, size, size)))[2]
    transform = SSDDefaultTrainTransform(size, size, anchors)
    training, loss_of = trainer(net, learning_rate=1e-3), SSDMultiBoxLoss()
    draw = np.random.RandomState(0)
    for _ in range(5):
        x, classes, boxes = pictures_with_boxes(draw, transform, size)
        with autograd.record():
            found_classes, found_boxes, _ = net(x)
            total, *_ = loss_of([found_classes], [found_boxes], [classes], [boxes])
            autograd.backward(total)
        training.step(1)
    left = left_in(net)
    zeros = [name for name in left if name.endswith("grad") and not left[name].any()]
    assert len(zeros) < 20  # some layers have anchors that no box is near
    return left


@SCENARIOS.add
def bert(prepare: Prepare) -> Arrays:
    from gluonnlp.model import BERTEncoder, BERTModel

    encoder = BERTEncoder(
        units=32, hidden_size=64, num_layers=4, num_heads=4, max_length=16, dropout=0.1
    )
    sizes = {"vocab_size": 50, "token_type_vocab_size": 2, "units": 32, "embed_size": 32}
    net = prepare(initialized(BERTModel(encoder, **sizes, use_decoder=False)))
    training = trainer(net, optimizer="adam", learning_rate=1e-3)
    draw = np.random.RandomState(0)
    for _ in range(5):
        about = draw.randint(0, 50, (4, 12)), draw.randint(0, 2, (4, 12)), draw.randint(3, 13, 4)
        with autograd.record():
            *_, follows = net(*map(mx.nd.array, about))
            loss = LOSS(follows, mx.nd.array(draw.randint(0, 2, 4)))
        loss.backward()
        training.step(4)
    return left_in(net)


@SCENARIOS.add
def transformer(prepare: Prepare) -> Arrays:
    from gluonnlp.model import TransformerEncoder

    sizes = {"units": 32, "hidden_size": 64, "num_layers": 4, "num_heads": 4, "max_length": 16}
    net = prepare(initialized(TransformerEncoder(**sizes, dropout=0.1)))
    training = trainer(net, optimizer="adam", learning_rate=1e-3)
    draw = np.random.RandomState(0)
    for _ in range(5):
        x, lengths = draw.randn(4, 12, 32), draw.randint(3, 13, 4)
        with autograd.record():
            out, _ = net(mx.nd.array(x), None, mx.nd.array(lengths))
            loss = LOSS(out.mean(axis=1), mx.nd.array(draw.randint(0, 10, 4)))
        loss.backward()
        training.step(4)
    return left_in(net)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", SCENARIOS)
def test_bits(name: str, how: str) -> None:
    assert unlike_plain(SCENARIOS[name], how) == []
