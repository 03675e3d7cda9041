#!/bin/bash
# Expected: clip_gradient=-1 means 'do not clip', as the reference of MXNet's update operators says.
# (Guess: the same in all optimizers.)
# Seen: for SGD, NAG, Adam, RMSProp, Signum, FTML, Ftrl and LAMB it does. In Nadam, AdaMax, AdaGrad, AdaDelta and DCASGD every
# gradient becomes -1, whatever its sign: all weights grow in every step. Nothing is raised.
# MXNet 1.9.1 with NumPy 1.23.5.
# Hurts: configurations and sweeps that write -1 for 'off' and then change the optimizer: training diverges or goes upwards,
# and the optimizer gets the blame. Use None.
# Source: these optimizers call clip(grad, -c, c) in Python for any c that is not None (python/mxnet/optimizer/optimizer.py);
# the operators in C++ compare with 0 first (src/operator/optimizer_op-inl.h).
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
from mxnet import nd


def step(name, gradient, **options):
    weight = nd.array([1.0])
    optimizer = mx.optimizer.create(name, learning_rate=0.5, **options)
    mx.optimizer.get_updater(optimizer)(0, nd.array([gradient]), weight)
    return round(weight.asnumpy().item() - 1, 4)


print("mxnet", mx.__version__, "| steps of a weight for gradients 0.5 and -0.5")
uphill = []
for name in "sgd nag adam rmsprop signum ftml ftrl lamb nadam adamax adagrad adadelta dcasgd".split():
    plain = [step(name, gradient) for gradient in (0.5, -0.5)]
    clipped = [step(name, gradient, clip_gradient=-1) for gradient in (0.5, -0.5)]
    print(name, "without:", plain, "with clip_gradient=-1:", clipped)
    if clipped != plain:
        assert clipped[0] == clipped[1] > 0
        uphill.append(name)
assert uphill == ["nadam", "adamax", "adagrad", "adadelta", "dcasgd"]
EOF
