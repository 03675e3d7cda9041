"""Drawn networks that mix convolutions with operators that know no blocks of MKLDNN.

``mixed_networks`` of the examples has the kinds that people train.
"""

from __future__ import annotations

from typing import Any, Callable, Sequence

import memonger  # noqa: F401
import mxnet as mx
import numpy as np

from mixed_networks import Network, classified, fully_gate, squeezed

S = mx.sym
FAMILIES = (
    "gated gated_fully shifted split divided shuffled padded hard_swish product instance_norm up"
).split()
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

    # Families of blocks: each takes an image and its channels, an even number.

    def gated(self, x: Any, filters: int) -> Any:
        x = self.conv(x, filters)
        gate = self.conv(squeezed(x), filters)
        gate = S.Activation(gate, "sigmoid") if self.one_in(2) else S.clip(gate + 0.5, 0, 1)
        return S.broadcast_mul(x, gate)

    def gated_fully(self, x: Any, filters: int) -> Any:
        x = self.conv(x, filters)
        return S.broadcast_mul(x, fully_gate(S.Flatten(squeezed(x)), filters))

    def shifted(self, x: Any, filters: int) -> Any:
        x = self.conv(x, filters, 3)
        return S.broadcast_add(x, self.conv(squeezed(x), filters))

    def split(self, x: Any, filters: int) -> Any:
        half = S.SliceChannel(self.conv(x, filters), num_outputs=2, axis=1)
        return S.Concat(self.activation(self.conv(half[0], filters // 2, 3)), half[1], dim=1)

    def divided(self, x: Any, filters: int) -> Any:
        x = self.conv(x, filters, 3)
        return S.broadcast_div(x, S.sqrt(S.sum(S.square(x), axis=1, keepdims=True) + 1e-3))

    def shuffled(self, x: Any, filters: int) -> Any:
        x = S.reshape(self.conv(x, filters), shape=(0, -4, 2, -1, -2))
        x = S.swapaxes(x, 1, 2) if self.one_in(2) else S.transpose(x, axes=(0, 2, 1, 3, 4))
        return self.conv(self.activation(S.reshape(x, shape=(0, -3, -2))), filters, 3)

    def padded(self, x: Any, filters: int) -> Any:
        border = (0, 0, 0, 0, 1, 1, 1, 1)
        x = S.Pad(self.conv(x, filters, 3), mode="constant", pad_width=border, constant_value=0)
        return S.slice_axis(S.slice_axis(x, axis=2, begin=1, end=-1), axis=3, begin=1, end=-1)

    def hard_swish(self, x: Any, filters: int) -> Any:
        x = self.norm(self.conv(x, filters, 3))
        return x * S.clip(x + 3, 0, 6) / 6

    def product(self, x: Any, filters: int) -> Any:
        return S.tanh(self.conv(x, filters, 3)) * S.sigmoid(self.conv(x, filters))

    def instance_norm(self, x: Any, filters: int) -> Any:
        return S.InstanceNorm(self.conv(x, filters, 3))

    def up(self, x: Any, filters: int) -> Any:
        x = S.Pooling(self.conv(x, filters, 3), kernel=(2, 2), stride=(2, 2), pool_type="max")
        return S.UpSampling(self.activation(x), scale=2, sample_type="nearest")

    def plain(self, x: Any, filters: int) -> Any:
        return self.conv(x, filters, 3)

    def joined(self, x: Any, filters: int) -> Any:
        y = self.activation(self.norm(self.conv(x, filters)))
        return self.conv(S.Concat(x, y, dim=1), filters)

    def pooled(self, x: Any, filters: int) -> Any:
        kind = "max" if self.one_in(2) else "avg"
        return S.Pooling(x, kernel=(3, 3), pad=(1, 1), pool_type=kind)

    def dropped(self, x: Any, filters: int) -> Any:
        return S.Dropout(self.activation(x), p=0.2)

    def transposed(self, x: Any, filters: int) -> Any:
        return S.Deconvolution(self.activation(x), num_filter=filters, kernel=(3, 3), pad=(1, 1))

    def grouped(self, x: Any, filters: int) -> Any:
        return self.conv(x, filters, 3, num_group=2)

    def network(self, names: Sequence[str]) -> Network:
        random = self.random
        families: list[Callable[[Any, int], Any]] = [getattr(self, name) for name in names]
        filters = int(random.choice([6, 8, 16, 24, 32, 48, 64]))
        batch, side = int(random.choice([2, 3, 4])), int(random.choice([6, 8, 12]))
        blocks = random.randint(2, 6)
        chosen = [families[k] for k in random.choice(len(families), random.randint(1, 3), False)]
        x = self.conv(S.var("data"), filters, 3)
        for _ in range(blocks):
            y = self.norm(x)
            if self.one_in(2):
                y = self.activation(y)
            y = chosen[random.randint(len(chosen))](y, filters)
            if self.one_in(3):
                y = self.activation(self.norm(y))
            joined = random.randint(8)
            x = y if joined == 0 else S.broadcast_add(x, y) if joined == 1 else x + y
        return classified(self.activation(self.norm(x))), {"data": (batch, 3, side, side)}


def drawn(seed: int, families: Sequence[str] = FAMILIES) -> Network:
    """A residual network of one or two of these families of blocks."""
    with mx.name.NameManager():
        return _Drawn(seed).network(families)
