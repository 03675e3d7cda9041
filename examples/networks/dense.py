"""Networks of fully connected layers."""

from .common import Network, classify, freshly_named
import mxnet as mx


@freshly_named
def chain(depth: int = 64, hidden: int = 1024, batch: int = 256) -> Network:
    """`depth` layers of FullyConnected and tanh, all alike: by default every tensor is 1 MiB."""
    x = mx.sym.Variable("data")
    for i in range(depth):
        x = mx.sym.FullyConnected(x, num_hidden=hidden, name=f"fc{i}")
        x = mx.sym.Activation(x, act_type="tanh", name=f"tanh{i}")
    x = mx.sym.LinearRegressionOutput(x, mx.sym.Variable("label"), name="out")
    return x, {"data": (batch, hidden), "label": (batch, hidden)}


@freshly_named
def highway(
    layers: int = 50, hidden: int = 1024, batch: int = 128, input: int = 784, classes: int = 10
) -> Network:
    """Highway network (Srivastava et al. 2015, arXiv 1505.00387): gates that let inputs pass."""
    x = mx.sym.FullyConnected(mx.sym.Variable("data"), num_hidden=hidden, name="input")
    for i in range(layers):
        gate = mx.sym.FullyConnected(x, num_hidden=hidden, name=f"gate{i}")
        gate = mx.sym.Activation(gate, act_type="sigmoid")
        y = mx.sym.FullyConnected(x, num_hidden=hidden, name=f"transform{i}")
        y = mx.sym.Activation(y, act_type="relu")
        x = gate * y + (1 - gate) * x
    return classify(x, classes), {"data": (batch, input), "softmax_label": (batch,)}
