#!/bin/bash
# Expected: forward(is_train=False) reads parameters and writes none.
# (Guess: the array of gamma stays as it is.)
# Seen: an executor that is bound for training, used only to score, writes 1 over the gamma of a BatchNorm with fix_gamma (the
# default of the symbol): 5 becomes 1 in the array that the user bound. Bound with grad_req 'null', it stays 5. The results
# are the same.
# MXNet 1.9.1, on a CPU.
# Hurts: whoever converts such checkpoints for other frameworks (there gamma counts), compares files by checksum, or shares
# arrays with a network that has fix_gamma=False. Bind with grad_req='null' to score.
# Source: BatchNorm's forward sets the weight if fix_gamma (src/operator/nn/batch_norm.cc, mkldnn/mkldnn_batch_norm-inl.h).
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

print("mxnet", mx.__version__)
net = mx.sym.BatchNorm(mx.sym.Variable("data"), name="norm")
seen, outs = {}, {}
for request in ("write", "null"):
    gamma = mx.nd.full((3,), 5)
    arrays = {"data": mx.nd.array([[1, 2, 3], [3, 2, 1]]), "norm_gamma": gamma, "norm_beta": mx.nd.zeros(3)}
    statistics = {"norm_moving_mean": mx.nd.zeros(3), "norm_moving_var": mx.nd.ones(3)}
    gradients = {name: mx.nd.zeros_like(array) for name, array in arrays.items()}
    executor = net.bind(mx.cpu(), arrays, gradients, request, statistics)
    outs[request] = executor.forward(is_train=False)[0].asnumpy().tolist()
    mx.nd.waitall()
    seen[request] = gamma.asnumpy().tolist()
    print("bound with", request, "| gamma, 5 before scoring:", seen[request], "| results", outs[request])
assert seen == {"write": [1, 1, 1], "null": [5, 5, 5]}
EOF
