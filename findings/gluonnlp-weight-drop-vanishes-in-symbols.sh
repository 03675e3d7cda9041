#!/bin/bash
# Expected: apply_weight_drop of gluonnlp drops weights in training however the block runs, or is lost when it is hybridized.
# (Guess: lost by hybridize.)
# Seen: hybridize keeps it, with static_alloc too. A symbol of the block loses it without a message:
# block(mx.sym.Variable('data')), export() and any executor or Module made from them hold no Dropout, and in training give the
# full weight's result each time.
# gluonnlp 0.10.0, MXNet 1.9.1.
# Hurts: AWD-LSTM language models that are trained as a symbol (Module, a planner, a converter): the regularization that makes
# the model is gone, and only the validation perplexity shows it. Write Dropout of the weight into the symbol.
# Source: WeightDropParameter overrides data() but not var() (gluonnlp/model/parameter.py).
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
venv/bin/pip install -q --disable-pip-version-check --no-compile mxnet==1.9.1 numpy==1.23.5 graphviz==0.8.4 'requests<3' \
    packaging==24.2
venv/bin/pip install -q --disable-pip-version-check --no-compile --no-deps gluonnlp==0.10.0
venv/bin/python - <<'EOF'
import gluonnlp
import mxnet as mx
from gluonnlp.model.utils import apply_weight_drop
from mxnet import autograd, gluon, nd


def dense():
    block = gluon.nn.Dense(16, in_units=64, use_bias=False, prefix="d_")
    apply_weight_drop(block, ".*weight", rate=0.5)
    block.initialize(mx.init.One())
    return block


def results_in_training(block):
    seen = set()
    for _ in range(5):
        with autograd.record():
            seen.update(block(nd.ones((1, 64))).asnumpy().ravel().tolist())
    return seen


print("gluonnlp", gluonnlp.__version__, "mxnet", mx.__version__)
plain, hybrid = dense(), dense()
hybrid.hybridize(static_alloc=True)
counts = [len(results_in_training(block)) for block in (plain, hybrid)]
print("different results of 80, plain and hybridized:", counts)
assert min(counts) > 5
symbol = dense()(mx.sym.Variable("data"))
executor = symbol.simple_bind(mx.cpu(), data=(1, 64))
for array in executor.arg_arrays:
    array[:] = 1
seen = set()
for _ in range(5):
    seen.update(executor.forward(is_train=True)[0].asnumpy().ravel().tolist())
print("as a symbol:", symbol.get_internals().list_outputs(), "results", seen)
assert seen == {64}
EOF
