#!/bin/bash
# Expected: relu of NaN is NaN, as everywhere in deep learning, so that a broken weight shows in the loss.
# (Guess: NaN.)
# Seen on the CPU: Activation with relu, which is what Gluon's activation='relu' runs, gives 0 for NaN in float32. A network
# whose first layer is all NaN has a loss of 0.5 and gradients without NaN. nd.relu, nd.maximum, clip, LeakyReLU and the same
# operator in float64 give NaN. softmax of (NaN, 1) is (NaN, 0).
# MXNet 1.9.1 with oneDNN. NaN in the wheel of 1.6.0, which has none, and with MXNET_MKLDNN_ENABLED=0.
# Hurts: whoever looks for NaN in losses or gradients to notice a diverged layer, or to stop a run: the layer is dead and the
# training goes on. Test the parameters themselves; results on a GPU may differ.
# Source: relu of oneDNN compares x > 0 (src/operator/nn/mkldnn/mkldnn_act.cc hands it over).
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
import numpy as np
from mxnet import autograd, gluon, nd

data = nd.array([np.nan, 1, -1])
seen = {
    "Activation": nd.Activation(data, act_type="relu"),
    "LeakyReLU": nd.LeakyReLU(data, act_type="leaky", slope=0.25),
    "Activation, float64": nd.Activation(data.astype("float64"), act_type="relu"),
    "nd.relu": nd.relu(data),
    "maximum": nd.maximum(data, 0),
    "clip": nd.clip(data, 0, 6),
}
print("mxnet", mx.__version__, {name: array.asnumpy().tolist() for name, array in seen.items()})
hidden = [name for name, array in seen.items() if not np.isnan(array.asnumpy()[0])]
assert hidden == ["Activation"] and seen["Activation"].asnumpy()[0] == 0
net = gluon.nn.Sequential()
net.add(gluon.nn.Dense(4, activation="relu", in_units=3), gluon.nn.Dense(2, in_units=4))
net.initialize(mx.init.One())
net[0].weight.set_data(nd.full((4, 3), np.nan))
with autograd.record():
    loss = gluon.loss.L2Loss()(net(nd.ones((1, 3))), nd.ones((1, 2)))
loss.backward()
gradients = {name: parameter.grad().asnumpy() for name, parameter in net.collect_params().items()}
print("first weight all NaN: loss", loss.asnumpy(), "gradients", {name: g.ravel().tolist() for name, g in gradients.items()})
assert loss.asnumpy().tolist() == [0.5] and not any(np.isnan(gradient).any() for gradient in gradients.values())
EOF
