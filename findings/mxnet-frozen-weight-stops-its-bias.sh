#!/bin/bash
# Expected: a Dense layer whose weight has grad_req 'null' still trains its bias; tuning biases alone is done so.
# (Guess: the right gradient.)
# Seen on the CPU: the gradient of the bias is not written: it keeps what was in the array (7 here), zeros in Gluon, so the
# bias never moves. With the weight trained it is 3. Convolution is right, and so is Dense in float64.
# MXNet 1.9.1 with oneDNN.
# Hurts: bias-only tuning and transfer with frozen weights: biases of fully connected layers stay as they were, without a
# message. Set lr_mult=0 for the weight instead of grad_req 'null', or MXNET_MKLDNN_ENABLED=0.
# Source: the bias's gradient is computed with the weight's (src/operator/nn/mkldnn/mkldnn_fully_connected.cc).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export OMP_NUM_THREADS=1 MXNET_SUBGRAPH_VERBOSE=0
python=
for version in 3.8 3.9 3.10 3.11; do
    for candidate in "python$version" "$HOME"/.pyenv/versions/"$version".*/bin/python; do
        if "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; then
            python=$candidate
            break 2
        fi
    done
done
[ -n "$python" ] || { echo "needs one of Python 3.8, 3.9, 3.10, 3.11" >&2; exit 2; }
"$python" -m venv venv
venv/bin/pip install -q --disable-pip-version-check --no-compile mxnet==1.9.1 numpy==1.23.5 graphviz==0.8.4 'requests<3'
venv/bin/python - <<'EOF'
import mxnet as mx
from mxnet import autograd, gluon, nd

print("mxnet", mx.__version__)


def bias_gradient(layer, dtype, weight_request):
    layer.cast(dtype)
    layer.initialize()
    layer.weight.grad_req = weight_request
    data = nd.ones((3, 4) if isinstance(layer, gluon.nn.Dense) else (3, 4, 1, 1), dtype=dtype)
    layer.bias.grad()[:] = 7
    with autograd.record():
        out = layer(data)
    out.backward()
    return layer.bias.grad().asnumpy().tolist()


def dense():
    return gluon.nn.Dense(2, in_units=4)


def convolution():
    return gluon.nn.Conv2D(2, 1, in_channels=4)


for make, dtype, request, expected in (
    (dense, "float32", "write", 3),
    (dense, "float32", "null", 7),
    (dense, "float64", "null", 3),
    (convolution, "float32", "null", 3),
):
    seen = bias_gradient(make(), dtype, request)
    print(make.__name__, dtype, "weight", request, "-> gradient of the bias", seen)
    assert seen == [expected, expected]
EOF
