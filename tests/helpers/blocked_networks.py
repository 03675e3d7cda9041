"""Drawn networks that mix convolutions with operators that know no blocks of MKLDNN.

``mixed_networks`` of the examples has the kinds that people train.
"""

from __future__ import annotations

from typing import Any, Sequence

import memonger  # noqa: F401
import mxnet as mx
import numpy as np

from mixed_networks import Network, classified, fully_gate, squeezed

S = mx.sym

#: Families of blocks: what is made of an image x with n channels, an even number; after the bar
#: that is y. The names are those of mx.sym and of `_Drawn`.
_FAMILIES = """
gated: conv(x, n) | broadcast_mul(y, gate(conv(squeezed(y), n)))
gated_fully: conv(x, n) | broadcast_mul(y, fully_gate(Flatten(squeezed(y)), n))
shifted: conv(x, n, 3) | broadcast_add(y, conv(squeezed(y), n))
split: SliceChannel(conv(x, n), num_outputs=2, axis=1)
    | Concat(activation(conv(y[0], n // 2, 3)), y[1], dim=1)
divided: conv(x, n, 3) | broadcast_div(y, sqrt(sum(square(y), axis=1, keepdims=True) + 1e-3))
shuffled: turned(reshape(conv(x, n), shape=(0, -4, 2, -1, -2)))
    | conv(activation(reshape(y, shape=(0, -3, -2))), n, 3)
padded: Pad(conv(x, n, 3), mode='constant', pad_width=(0, 0, 0, 0, 1, 1, 1, 1), constant_value=0)
    | slice_axis(slice_axis(y, axis=2, begin=1, end=-1), axis=3, begin=1, end=-1)
hard_swish: norm(conv(x, n, 3)) | y * clip(y + 3, 0, 6) / 6
product: tanh(conv(x, n, 3)) | y * sigmoid(conv(x, n))
instance_norm: conv(x, n, 3) | InstanceNorm(y)
up: Pooling(conv(x, n, 3), kernel=(2, 2), stride=(2, 2), pool_type='max')
    | UpSampling(activation(y), scale=2, sample_type='nearest')
plain: x | conv(y, n, 3)
joined: activation(norm(conv(x, n))) | conv(Concat(x, y, dim=1), n)
pooled: x | Pooling(y, kernel=(3, 3), pad=(1, 1), pool_type='max' if one_in(2) else 'avg')
dropped: activation(x) | Dropout(y, p=0.2)
transposed: activation(x) | Deconvolution(y, num_filter=n, kernel=(3, 3), pad=(1, 1))
grouped: x | conv(y, n, 3, num_group=2)
"""
_TEXTS = dict(t.split(": ", 1) for t in _FAMILIES.replace("\n   ", "").strip().splitlines())
FAMILIES = list(_TEXTS)[:11]
#: Those for images of any size, in which MXNet trains and scores in turns.
ANY_SIZE = (
    "gated gated_fully shifted hard_swish product plain joined pooled dropped transposed grouped"
).split()


class _Drawn:
    """Draws parts of a residual network."""

    def __init__(self, seed: int) -> None:
        self.random = np.random.RandomState(seed)

    def one_in(self, n: int) -> bool:
        return self.random.randint(n) == 0

    def conv(self, x: Any, filters: int, kernel: int = 1, **more: Any) -> Any:
        size = {"kernel": (kernel, kernel), "pad": (kernel // 2, kernel // 2)}
        return S.Convolution(x, num_filter=filters, no_bias=self.one_in(2), **size, **more)

    def activation(self, x: Any) -> Any:
        kind = self.random.randint(5)
        if kind == 0:
            return S.LeakyReLU(x, act_type="leaky", slope=0.1)
        return S.clip(x, 0, 6) if kind == 1 else S.Activation(x, "tanh" if kind == 2 else "relu")

    def norm(self, x: Any) -> Any:
        return x if self.one_in(4) else S.BatchNorm(x, fix_gamma=False)

    def gate(self, x: Any) -> Any:
        return S.Activation(x, "sigmoid") if self.one_in(2) else S.clip(x + 0.5, 0, 1)

    def turned(self, x: Any) -> Any:
        return S.swapaxes(x, 1, 2) if self.one_in(2) else S.transpose(x, axes=(0, 2, 1, 3, 4))

    def block(self, family: str, x: Any, n: int) -> Any:
        own = {name: getattr(self, name) for name in vars(_Drawn)}
        names = {**vars(S), **own, "squeezed": squeezed, "fully_gate": fully_gate, "x": x, "n": n}
        first, last = _TEXTS[family].split(" | ")
        return eval(last, {**names, "y": eval(first, names)})

    def network(self, names: Sequence[str]) -> Network:
        random = self.random
        filters = int(random.choice([6, 8, 16, 24, 32, 48, 64]))
        batch, side = int(random.choice([2, 3, 4])), int(random.choice([6, 8, 12]))
        blocks = random.randint(2, 6)
        chosen = [names[k] for k in random.choice(len(names), random.randint(1, 3), False)]
        x = self.conv(S.var("data"), filters, 3)
        for _ in range(blocks):
            y = self.norm(x)
            if self.one_in(2):
                y = self.activation(y)
            y = self.block(chosen[random.randint(len(chosen))], y, filters)
            if self.one_in(3):
                y = self.activation(self.norm(y))
            joined = random.randint(8)
            x = y if joined == 0 else S.broadcast_add(x, y) if joined == 1 else x + y
        return classified(self.activation(self.norm(x))), {"data": (batch, 3, side, side)}


def drawn(seed: int, families: Sequence[str] = FAMILIES) -> Network:
    """A residual network of one or two of these families of blocks."""
    with mx.name.NameManager():
        return _Drawn(seed).network(families)
