"""Learn handwritten digits in Gluon's loop: a plain MXNet script, which knows nothing of memonger.

    OMP_NUM_THREADS=1 memonger run examples/train_gluon.py
    OMP_NUM_THREADS=1 python examples/train_gluon.py

As ``train_digits.py``, whose digits it learns, it ends with the same digest both times.
"""

from typing import Any

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon import nn
from train_digits import TRAINING_IMAGES, digits, read_options, report


class Residual(nn.HybridBlock):
    """Two convolutions with BatchNorm, whose result is added to their input."""

    def __init__(self, filters: int) -> None:
        super().__init__()
        with self.name_scope():
            self.body = nn.HybridSequential()
            for _ in range(2):
                self.body.add(nn.Conv2D(filters, 3, padding=1, use_bias=False))
                self.body.add(nn.BatchNorm(momentum=0.7), nn.Activation("relu"))

    def hybrid_forward(self, F: Any, x: Any) -> Any:
        return x + self.body(x)


def network(blocks: int, filters: int) -> Any:
    """Build a residual network."""
    net = nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(nn.Conv2D(filters, 3, padding=1))
        for _ in range(blocks):
            net.add(Residual(filters))
        net.add(nn.Flatten(), nn.Dropout(0.2), nn.Dense(10))
    return net


def main() -> None:
    """Train."""
    options, (images, labels), n = read_options(__doc__, epochs=4), digits(), TRAINING_IMAGES
    mx.random.seed(7)
    net = network(options.blocks, options.filters)
    net.initialize(mx.init.Xavier())
    net.hybridize()
    dataset = gluon.data.ArrayDataset(images[:n], labels[:n])
    loss_fn = gluon.loss.SoftmaxCrossEntropyLoss()
    trainer = gluon.Trainer(net.collect_params(), "adam", {"learning_rate": 0.01})
    for _ in range(options.epochs):
        for x, y in gluon.data.DataLoader(dataset, options.batch):
            with autograd.record():
                loss = loss_fn(net(x), y)
            loss.backward()
            trainer.step(x.shape[0])
    scores = net(mx.nd.array(images[n:])).asnumpy()
    parameters = {name: p.data() for name, p in net.collect_params().items()}
    report((scores.argmax(axis=1) == labels[n:]).mean(), parameters)


if __name__ == "__main__":
    main()
