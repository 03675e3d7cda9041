#!/bin/bash
# Expected: numpy.array_equal(a, a) of an NDArray is True, or raises.
# (Guess: True; numpy converts.)
# Seen: from NumPy 1.24 on it is False, for an array and itself too: NumPy cannot convert an NDArray (numpy.array(a) raises
# since then), and array_equal answers False for what it cannot convert. For mx.np arrays it is True.
# MXNet 1.9.1 with NumPy 1.26.4 (2.5.5 the same). With NumPy 1.23.5 two NDArrays compare as equal, by way of an array of 32
# dimensions, but an NDArray and its asnumpy() do not.
# Hurts: tests and checks that negate it ("weights have changed: not array_equal(before, after)"): they always pass. Write
# a.asnumpy() on both sides; mx.test_utils.same(a, b) calls array_equal too.
# Source: numpy.array_equal catches all errors of asarray; NDArray has no __array__ (python/mxnet/ndarray/ndarray.py).
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export OMP_NUM_THREADS=1 MXNET_SUBGRAPH_VERBOSE=0
python=
for version in 3.11; do
    for candidate in "python$version" "$HOME"/.pyenv/versions/"$version".*/bin/python; do
        if "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; then
            python=$candidate
            break 2
        fi
    done
done
[ -n "$python" ] || { echo "needs Python 3.11" >&2; exit 2; }
"$python" -m venv venv
venv/bin/pip install -q --disable-pip-version-check --no-compile numpy==1.26.4 graphviz==0.20.3 'requests<3'
venv/bin/pip install -q --disable-pip-version-check --no-compile --no-deps mxnet==1.9.1
venv/bin/python - <<'EOF'
import numpy as np

np.bool = np.bool_  # which MXNet still reads
import mxnet as mx

a, b = mx.nd.array([1, 2]), mx.nd.array([1, 2])
seen = {
    "a, a": np.array_equal(a, a),
    "a, equal b": np.array_equal(a, b),
    "a, a.asnumpy()": np.array_equal(a, a.asnumpy()),
    "both asnumpy()": np.array_equal(a.asnumpy(), b.asnumpy()),
    "mx.np": np.array_equal(mx.np.array([1, 2]), mx.np.array([1, 2])),
}
print("mxnet", mx.__version__, "numpy", np.__version__, seen)
assert not mx.test_utils.same(a, a)
assert [bool(value) for value in seen.values()] == [False, False, False, True, True]
EOF
