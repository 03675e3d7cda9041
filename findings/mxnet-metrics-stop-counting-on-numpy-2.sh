#!/bin/bash
# Expected: with the names supplied that NumPy 2 removed, MXNet's metrics compute what they did.
# (Guess: they do; the sums are Python floats.)
# Seen: the sums of Loss, MAE, MSE, RMSE, CrossEntropy and Perplexity become float32, and stop: after 16777216 the metric Loss
# does not grow by 100 terms of 1; with NumPy 1 it does. The printed value turns to np.float32(0.7). Accuracy counts as
# before.
# MXNet 1.9.1 with NumPy 2.5.5 on Python 3.13; with NumPy 1.23.5 the sum is a float64.
# Hurts: long epochs and losses summed over pixels or tokens: the mean drifts down, silently, and early stopping with it. Logs
# that parse the value break. Give metrics Python floats, or sum yourself in float.
# Source: NEP 50: 0.0 + numpy.float32(1) is a float32; sum_metric = 0.0 in python/mxnet/metric.py.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export OMP_NUM_THREADS=1 MXNET_SUBGRAPH_VERBOSE=0
python=
for version in 3.13; do
    for candidate in "python$version" "$HOME"/.pyenv/versions/"$version".*/bin/python; do
        if "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; then
            python=$candidate
            break 2
        fi
    done
done
[ -n "$python" ] || { echo "needs Python 3.13" >&2; exit 2; }
"$python" -m venv venv
venv/bin/pip install -q --disable-pip-version-check --no-compile numpy==2.5.5 setuptools==80.9.0 graphviz==0.20.3 'requests<3'
venv/bin/pip install -q --disable-pip-version-check --no-compile --no-deps mxnet==1.9.1
venv/bin/python - <<'EOF'
import numpy as np

removed = {"NaN": np.nan, "NAN": np.nan, "Inf": np.inf, "PINF": np.inf, "NINF": -np.inf}
removed.update(PZERO=0.0, NZERO=-0.0, bool=bool)
removed.update(alltrue=np.all, sometrue=np.any, product=np.prod, round_=np.round, in1d=np.isin, msort=np.sort, trapz=np.trapezoid)
removed.update(dict.fromkeys(["mirr", "npv", "pmt", "ppmt", "pv", "rate"]))
for name, value in removed.items():
    setattr(np, name, value)
import mxnet as mx

loss = mx.metric.Loss()
loss.update(None, mx.nd.full((1,), 2**24))
for _ in range(100):
    loss.update(None, mx.nd.ones(1))
print("mxnet", mx.__version__, "numpy", np.__version__, "| Loss: 2**24 and 100 ones are 2**24 +", loss.sum_metric - 2**24)
assert type(loss.sum_metric) is np.float32 and loss.sum_metric == 2**24
labels, scores = mx.nd.ones(3), mx.nd.array([[0.3, 0.7]] * 3)
types = {}
for name, outputs in (("mae", labels * 0.3), ("rmse", labels * 0.3), ("ce", scores), ("acc", scores)):
    metric = mx.metric.create(name)
    metric.update([labels], [outputs])
    types[name] = type(metric.sum_metric).__name__
    print(name, repr(metric.get()[1]))
print(types)
assert types == {"mae": "float32", "rmse": "float32", "ce": "float32", "acc": "float64"}
EOF
