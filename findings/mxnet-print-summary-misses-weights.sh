#!/bin/bash
# Expected: mx.viz.print_summary gives the number of parameters of a symbol ("Total params").
# (Guess: right for ordinary layers, perhaps tied weights twice.)
# Seen: it counts 368 where the arrays hold 2692. A fully connected layer behind a feature map counts the channels alone (80
# for 16 units on 4 x 6 x 6, which has 2320). Deconvolution, LayerNorm, PReLU and RNN count as 0. Tied weights count each
# time.
# MXNet 1.9.1.
# Hurts: sizes in papers and reports: of VGG-16 the first fully connected layer, three quarters of the network, is nearly all
# missing. Sum the sizes of infer_shape.
# Source: print_layer_summary in python/mxnet/visualization.py.
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
import contextlib
import io
import re

import mxnet as mx
import numpy as np

net = mx.sym.Deconvolution(mx.sym.Variable("data"), kernel=(2, 2), stride=(2, 2), num_filter=8, no_bias=True, name="up")
net = mx.sym.LayerNorm(net, name="norm")
net = mx.sym.Convolution(net, kernel=(3, 3), num_filter=4, no_bias=True, name="conv")
net = mx.sym.LeakyReLU(net, act_type="prelu", name="prelu")
net = mx.sym.FullyConnected(net, num_hidden=16, name="dense")
shape = (1, 2, 4, 4)
sizes = {name: int(np.prod(size)) for name, size in zip(net.list_arguments(), net.infer_shape(data=shape)[0])}
real = sum(size for name, size in sizes.items() if name != "data")
text = io.StringIO()
with contextlib.redirect_stdout(text):
    mx.viz.print_summary(net, {"data": shape})
told = {name: int(count) for name, count in re.findall(r"^(\w+)\(\w+\) +\S+ +(\d+)", text.getvalue(), re.MULTILINE)}
total = int(re.search(r"Total params: (\d+)", text.getvalue())[1])
print("mxnet", mx.__version__, "| told", total, told, "| real", real, sizes)
assert (total, real) == (368, 2692)
assert told["dense"] == 80 and sizes["dense_weight"] + sizes["dense_bias"] == 2320
assert told["up"] == told["norm"] == told["prelu"] == 0 and sizes["up_weight"] == 64
w = mx.sym.Variable("tied", shape=(8, 8))
tied = mx.sym.FullyConnected(mx.sym.Variable("data"), weight=w, num_hidden=8, no_bias=True, name="first")
tied = mx.sym.FullyConnected(tied, weight=w, num_hidden=8, no_bias=True, name="second")
text = io.StringIO()
with contextlib.redirect_stdout(text):
    mx.viz.print_summary(tied, {"data": (1, 8)})
print("one tied weight of 64:", text.getvalue().strip().splitlines()[-2])
assert "Total params: 128" in text.getvalue()
EOF
