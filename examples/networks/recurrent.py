"""An unrolled recurrent network."""

from collections import namedtuple
from typing import Any, Dict, List, Optional

from .common import Network, Shape, dropout_of, freshly_named
import mxnet as mx


State = namedtuple("State", ["c", "h"])
Gates = namedtuple("Gates", ["i2h_weight", "i2h_bias", "h2h_weight", "h2h_bias"])


def _lstm_cell(
    x: Any, before: State, gates: Gates, hidden: int, step: int, layer: int, dropout: float
) -> State:
    name = f"t{step}_l{layer}_"
    i2h = mx.sym.FullyConnected(
        dropout_of(x, dropout),
        weight=gates.i2h_weight,
        bias=gates.i2h_bias,
        num_hidden=hidden * 4,
        name=name + "i2h",
    )
    h2h = mx.sym.FullyConnected(
        before.h,
        weight=gates.h2h_weight,
        bias=gates.h2h_bias,
        num_hidden=hidden * 4,
        name=name + "h2h",
    )
    parts = mx.sym.SliceChannel(i2h + h2h, num_outputs=4, name=name + "slice")
    in_gate, in_transform, forget_gate, out_gate = (
        mx.sym.Activation(parts[i], act_type=act_type)
        for i, act_type in enumerate(("sigmoid", "tanh", "sigmoid", "sigmoid"))
    )
    c = (forget_gate * before.c) + (in_gate * in_transform)
    h = out_gate * mx.sym.Activation(c, act_type="tanh")
    # All layers of a time step make one cut, hence one label.
    c._set_attr(mirror_stage=str(step))
    h._set_attr(mirror_stage=str(step))
    return State(c=c, h=h)


def _decode(x: Any, label: str, loss: str, use_loss: bool, **fully_connected: Any) -> Any:
    scores = mx.sym.FullyConnected(x, **fully_connected)
    wanted = mx.sym.Variable(label)
    if use_loss:
        return mx.sym.softmax_cross_entropy(scores, wanted, name=loss)
    return mx.sym.SoftmaxOutput(scores, label=wanted, name=loss)


@freshly_named
def lstm(
    layers: int = 4,
    steps: int = 1000,
    batch: int = 64,
    hidden: int = 1024,
    embed: Optional[int] = None,
    labels: int = 5000,
    input: int = 50,
    concat_decode: bool = False,
    use_loss: bool = True,
    dropout: float = 0.0,
) -> Network:
    """Unrolled LSTM of the original's ``example_lstm.py``, ``mirror_stage`` labelled by time step.

    `embed` defaults to `hidden`. With `concat_decode` one decoder reads all steps at once; with
    `use_loss` the heads are scalars of ``softmax_cross_entropy``, else ``SoftmaxOutput``.
    """
    embed_weight = mx.sym.Variable("embed_weight")
    decoder = {
        "weight": mx.sym.Variable("cls_weight"),
        "bias": mx.sym.Variable("cls_bias"),
        "num_hidden": labels,
    }
    gates: List[Gates] = []
    states: List[State] = []
    shapes: Dict[str, Shape] = {}
    for i in range(layers):
        gates.append(Gates(*(mx.sym.Variable(f"l{i}_{field}") for field in Gates._fields)))
        states.append(State(*(mx.sym.Variable(f"l{i}_init_{f}") for f in State._fields)))
        shapes.update({f"l{i}_init_{field}": (batch, hidden) for field in State._fields})

    last_hidden = []
    for step in range(steps):
        shapes[f"t{step}_data"] = (batch, input)
        with mx.AttrScope(ctx_group="embed"):
            x = mx.sym.FullyConnected(
                mx.sym.Variable(f"t{step}_data"),
                weight=embed_weight,
                no_bias=True,
                num_hidden=hidden if embed is None else embed,
                name=f"t{step}_embed",
            )
        for i in range(layers):
            with mx.AttrScope(ctx_group=f"layer{i}"):
                drop = dropout if i > 0 else 0.0
                states[i] = _lstm_cell(x, states[i], gates[i], hidden, step, i, drop)
                x = states[i].h
        last_hidden.append(dropout_of(x, dropout))

    with mx.AttrScope(ctx_group="decode"):
        if concat_decode:
            x = mx.sym.Concat(*last_hidden, dim=0)
            heads = [_decode(x, "label", "sm", use_loss, **decoder)]
            shapes["label"] = (batch * steps,)
        else:
            heads = []
            for step, x in enumerate(last_hidden):
                t = f"t{step}_"
                heads.append(_decode(x, t + "label", t + "sm", use_loss, name=t + "cls", **decoder))
                shapes[t + "label"] = (batch,)
    for field in State._fields:
        for i, state in enumerate(states):
            last = mx.sym.BlockGrad(getattr(state, field), name=f"l{i}_last_{field}")
            heads.append(last)
    return mx.sym.Group(heads), shapes
