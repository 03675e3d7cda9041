"""Networks over sequences of tokens."""

from typing import Any, Optional, Sequence

from .common import Network, classify, dropout_of, freshly_named
import mxnet as mx


def _attention(x: Any, name: str, hidden: int, heads: int, dropout: float) -> Any:
    def project(x: Any, part: str) -> Any:
        return mx.sym.FullyConnected(x, num_hidden=hidden, flatten=False, name=name + part)

    def split(x: Any) -> Any:
        """(batch, steps, hidden) -> (batch * heads, steps, hidden / heads)."""
        x = mx.sym.reshape(x, (0, 0, -4, heads, -1))
        return mx.sym.reshape(mx.sym.transpose(x, (0, 2, 1, 3)), (-3, 0, 0))

    query, key, value = (split(project(x, part)) for part in ("_query", "_key", "_value"))
    scores = mx.sym.batch_dot(query, key, transpose_b=True) / (hidden // heads) ** 0.5
    x = mx.sym.batch_dot(dropout_of(mx.sym.softmax(scores), dropout), value)
    x = mx.sym.transpose(mx.sym.reshape(x, (-4, -1, heads, 0, 0)), (0, 2, 1, 3))
    return project(mx.sym.reshape(x, (0, 0, -3)), "_output")


@freshly_named
def transformer(
    layers: int = 12,
    batch: int = 8,
    steps: int = 512,
    hidden: int = 768,
    heads: int = 12,
    inner: Optional[int] = None,
    vocabulary: int = 30522,
    dropout: float = 0.0,
) -> Network:
    """Build a transformer encoder over tokens, LayerNorm first, one softmax per token.

    `inner` is the width of the feed-forward layers, 4 times `hidden` by default.
    """
    x = mx.sym.Embedding(
        mx.sym.Variable("data"), input_dim=vocabulary, output_dim=hidden, name="token"
    )
    x = mx.sym.broadcast_add(x, mx.sym.Variable("position_weight", shape=(1, steps, hidden)))
    x = dropout_of(x, dropout)
    for i in range(layers):
        name = f"layer{i}"
        y = mx.sym.LayerNorm(x, name=name + "_norm1")
        x = x + dropout_of(_attention(y, name, hidden, heads, dropout), dropout)
        y = mx.sym.LayerNorm(x, name=name + "_norm2")
        y = mx.sym.FullyConnected(
            y, num_hidden=inner or 4 * hidden, flatten=False, name=name + "_inner"
        )
        y = mx.sym.LeakyReLU(y, act_type="gelu")
        y = mx.sym.FullyConnected(y, num_hidden=hidden, flatten=False, name=name + "_outer")
        x = x + dropout_of(y, dropout)
    x = mx.sym.reshape(mx.sym.LayerNorm(x, name="norm"), (-3, 0))
    x = mx.sym.FullyConnected(x, num_hidden=vocabulary, name="decoder")
    label = mx.sym.reshape(mx.sym.Variable("softmax_label"), (-1,))
    x = mx.sym.SoftmaxOutput(x, label, name="softmax")
    return x, {"data": (batch, steps), "softmax_label": (batch, steps)}


@freshly_named
def embedding_net(
    batch: int = 64,
    steps: int = 50,
    vocabulary: int = 20000,
    embed: int = 300,
    filters: int = 100,
    widths: Sequence[int] = (3, 4, 5),
    classes: int = 2,
    dropout: float = 0.5,
) -> Network:
    """Convolutions over embedded words, for sentences (Kim 2014, arXiv 1408.5882)."""
    x = mx.sym.Embedding(
        mx.sym.Variable("data"), input_dim=vocabulary, output_dim=embed, name="embed"
    )
    x = mx.sym.expand_dims(x, axis=1)
    pooled = []
    for width in widths:
        y = mx.sym.Convolution(x, num_filter=filters, kernel=(width, embed), name=f"width{width}")
        y = mx.sym.Activation(y, act_type="relu")
        pooled.append(mx.sym.max(y, axis=(2, 3)))
    x = dropout_of(mx.sym.Concat(*pooled, dim=1), dropout)
    return classify(x, classes), {"data": (batch, steps), "softmax_label": (batch,)}
