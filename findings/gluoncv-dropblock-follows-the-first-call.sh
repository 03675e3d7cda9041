#!/bin/bash
# Expected: a hybridized block with gluoncv's DropBlock drops in training and not in inference, as Dropout does.
# (Guess: it does.)
# Seen: the first call decides for good. If that is inference (or the shape is tried out once), training never drops; if it is
# in training, inference drops too: about half of the outputs are zero at drop_prob 0.5. Not hybridized, both are right.
# gluoncv 0.10.5.post0 (its __version__ says 0.11.0), MXNet 1.9.1.
# Hurts: ResNeSt with dropblock_prob: results of the trained network in the same process are random, or the regularization is
# off; a symbol of it never has any. Call hybridize() again before each change of mode (it forgets the graph), or use Dropout.
# Source: hybrid_forward asks autograd.is_training() in Python, once for a graph (gluoncv/nn/dropblock.py).
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
venv/bin/pip install -q --disable-pip-version-check --no-compile scipy==1.10.1 numpy==1.23.5 pandas==1.5.3 matplotlib==3.7.5 \
    opencv-python-headless==4.7.0.72 Pillow==10.4.0 tqdm==4.67.1 yacs==0.1.8 portalocker==2.8.2 pyyaml==6.0.2
venv/bin/pip install -q --disable-pip-version-check --no-compile --no-deps gluoncv==0.10.5.post0 autocfg==0.0.8
venv/bin/python - <<'EOF'
import warnings

warnings.simplefilter("ignore")
import gluoncv
import mxnet as mx
from gluoncv.nn.dropblock import DropBlock
from mxnet import autograd, gluon, nd

data = nd.ones((1, 4, 16, 16))


def zeros(block, training):
    with autograd.record(training) if training else autograd.predict_mode():
        return float((block(data).asnumpy() == 0).mean())


def make(hybrid):
    block = gluon.nn.HybridSequential()
    block.add(DropBlock(0.5, 3, 4, 16, 16))
    if hybrid:
        block.hybridize()
    return block


print("gluoncv", gluoncv.__version__, "mxnet", mx.__version__, "| share of zeros")
for hybrid in (False, True):
    for first in (False, True):
        block = make(hybrid)
        zeros(block, training=first)
        seen = {"training": zeros(block, training=True), "inference": zeros(block, training=False)}
        print("hybridized" if hybrid else "plain", "| first call in", "training" if first else "inference", "->", seen)
        drops = {mode: share > 0.1 for mode, share in seen.items()}
        assert drops == ({"training": first, "inference": first} if hybrid else {"training": True, "inference": False})
EOF
