#!/bin/bash
# Expected: labels < 0.5 for labels 0, 1, 2, 3 is true for the 0, whatever the type; 3 * 0.5 of integers is 1 or 1.5.
# (Guess: comparison as floats, product 1.)
# Seen: for an integer NDArray the scalar is cut to an integer first. With int32, x < 0.5 is false everywhere, x >= 0.5 is
# true everywhere, x * 0.5 is 0 everywhere, x * 1.5 is x, and x ** 0.5 is 1. Nothing is raised. Arrays of mx.np, which is made
# to compute like NumPy, do the same, except for x / 2; a scalar that is an array, mx.np.array(0.5), is not cut.
# MXNet 1.9.1 (1.5.1, 1.6.0 and 1.7.0 too).
# Hurts: masks and scaling of labels, token ids and images that are kept in integers. Call astype('float32') first.
# Source: the scalar operators turn the parameter into the array's type (src/operator/tensor/elemwise_binary_scalar_op.h).
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
integers = mx.nd.array([0, 1, 2, 3], dtype="int32")
floats = integers.astype("float32")
cases = {
    "x < 0.5": (lambda x: x < 0.5, [0, 0, 0, 0], [1, 0, 0, 0]),
    "x >= 0.5": (lambda x: x >= 0.5, [1, 1, 1, 1], [0, 1, 1, 1]),
    "x * 0.5": (lambda x: x * 0.5, [0, 0, 0, 0], [0, 0.5, 1, 1.5]),
    "x * 1.5": (lambda x: x * 1.5, [0, 1, 2, 3], [0, 1.5, 3, 4.5]),
}
for name, (compute, of_integers, of_floats) in cases.items():
    seen = compute(integers).asnumpy().tolist()
    print(name, "| int32:", seen, "| float32:", compute(floats).asnumpy().tolist())
    assert seen == of_integers
    assert compute(floats).asnumpy().tolist() == of_floats
mx.npx.set_np()
like_numpy = mx.np.array([0, 1, 2, 3], dtype="int32")
by_scalar = [(like_numpy * 0.5).tolist(), (like_numpy < 0.5).tolist(), (like_numpy / 2).tolist()]
by_array = (like_numpy * mx.np.array(0.5)).tolist()
print("mx.np: x * 0.5, x < 0.5, x / 2:", *by_scalar, "| x * mx.np.array(0.5):", by_array)
assert by_scalar == [[0, 0, 0, 0], [False] * 4, [0, 0.5, 1, 1.5]] and by_array == [0, 0.5, 1, 1.5]
EOF
