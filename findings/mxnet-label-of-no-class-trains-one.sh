#!/bin/bash
# Expected: a label that is no class (-1 for 'ignore', or one too large) raises, or is left out of the loss.
# (Guess: an error in Gluon, no gradient from SoftmaxOutput.)
# Seen, with three classes and equal scores: gluon.loss.SoftmaxCrossEntropyLoss takes label -1 for class 0 and label 7 for
# class 2, with an ordinary loss of 1.0986, and trains these classes. SoftmaxOutput finds no class at all: its gradient is the
# softmax itself (1/3, 1/3, 1/3), which pushes every score down and does not sum to zero. one_hot gives a row of zeros.
# MXNet 1.9.1.
# Hurts: segmentation and language models with ignored positions, and off-by-one labels: the loss falls, and class 0 or the
# last one is trained on what should be ignored. Mask with sample_weight, or use_ignore=True for SoftmaxOutput (it takes one
# label).
# Source: pick with mode 'clip' in python/mxnet/gluon/loss.py; src/operator/softmax_output-inl.h.
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

print("mxnet", mx.__version__)


def gradient(loss):
    scores = nd.zeros((3, 3))
    scores.attach_grad()
    with autograd.record():
        value = loss(scores, nd.array([-1, 1, 7]))
    value.backward()
    return value.asnumpy(), scores.grad.asnumpy()


loss, by_gluon = gradient(gluon.loss.SoftmaxCrossEntropyLoss())
print("Gluon, labels -1, 1, 7: loss", loss, "gradient", by_gluon.tolist())
assert np.allclose(loss, np.log(3))
assert by_gluon.argmin(axis=1).tolist() == [0, 1, 2]
_, by_output = gradient(nd.SoftmaxOutput)
print("SoftmaxOutput: gradient", by_output.tolist(), "sums", by_output.sum(axis=1).round(3).tolist())
assert np.allclose(by_output[[0, 2]], 1 / 3) and abs(by_output[1].sum()) < 1e-6
EOF
