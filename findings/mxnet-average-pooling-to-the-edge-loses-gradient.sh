#!/bin/bash
# Expected: average pooling with pooling_convention='full' (Gluon's ceil_mode=True) has the gradient of what it computes.
# (Guess: right, and equal in float32 and float64.)
# Seen on the CPU: in float32 windows that reach over the edge average what they have, but pass back a share for the whole
# window. On a map of 6 x 6, kernel 3, stride 2, the results are right, and the gradient of their sum adds up to 7.11 instead
# of 9; the last column gets 0.111 where finite differences and float64 give 0.167. A map of 8 x 8 is right.
# MXNet 1.9.1 with oneDNN; right in the wheel of 1.6.0, which has none.
# Hurts: networks from Caffe and Inception-like ones with ceil_mode: gradients near two edges are too small, by more than a
# half in the corner, at some sizes only, so a test at another size sees nothing. Pad, or set MXNET_MKLDNN_ENABLED=0.
# Source: measured; the padding that oneDNN is told is computed in src/operator/nn/mkldnn/mkldnn_pooling.cc.
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

pool = gluon.nn.AvgPool2D(3, 2, ceil_mode=True)


def gradient(size, dtype):
    data = nd.ones((1, 1, size, size), dtype=dtype)
    data.attach_grad()
    with autograd.record():
        out = pool(data)
    out.backward()
    return data.grad.asnumpy()[0, 0]


def difference(size, row, column):
    data = np.ones((1, 1, size, size), dtype="float32")
    data[0, 0, row, column] += 1
    return float(pool(nd.array(data)).asnumpy().sum() - pool(nd.ones_like(nd.array(data))).asnumpy().sum())


print("mxnet", mx.__version__)
for size, windows in ((6, 9), (8, 16)):
    single, double = gradient(size, "float32"), gradient(size, "float64")
    last = single[0, -1], double[0, -1], difference(size, 0, size - 1)
    print("size", size, "| sum of the gradient: float32", single.sum(), "float64", double.sum(), "right", windows)
    print("    element of the first row, last column: float32, float64, finite difference:", *last)
    assert abs(double.sum() - windows) < 1e-6 and abs(last[1] - last[2]) < 1e-5
    if size == 6:
        assert abs(single.sum() - 64 / 9) < 1e-5 and abs(last[0] - 1 / 9) < 1e-6
    else:
        assert np.allclose(single, double)
EOF
