#!/bin/bash
# Expected: the gradient of max over equal elements goes to one of them, or is shared.
# (Guess: to the first, or shared in equal parts.)
# Seen: each of the equal elements gets the whole gradient: three ties make the sum of the gradient 3 instead of 1; mx.np.max
# and min do the same. A global max Pooling, and topk with k=1, of the same row give it to the first alone.
# MXNet 1.9.1.
# Hurts: max over time or over channels behind relu, where many elements are 0 at once: a row of zeros multiplies the gradient
# by its length. Replacing Pooling by max changes the training. Use Pooling, or topk(k=1, ret_typ='value').
# Source: the backward operator compares all elements with the maximum (src/operator/tensor/broadcast_reduce_op.h).
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
from mxnet import autograd, nd

print("mxnet", mx.__version__)
cases = {
    "nd.max": (lambda x: nd.max(x, axis=1), [1, 1, 0, 1]),
    "mx.np.max": (lambda x: mx.np.max(x.as_np_ndarray(), axis=1), [1, 1, 0, 1]),
    "nd.min of -x": (lambda x: nd.min(-x, axis=1), [-1, -1, 0, -1]),
    "Pooling": (
        lambda x: nd.Pooling(x.reshape((1, 1, 1, 4)), global_pool=True, pool_type="max", kernel=(1, 4)),
        [1, 0, 0, 0],
    ),
    "topk": (lambda x: nd.topk(x, k=1, ret_typ="value"), [1, 0, 0, 0]),
}
for name, (compute, expected) in cases.items():
    data = nd.array([[3, 3, 1, 3]])
    data.attach_grad()
    with autograd.record():
        out = compute(data)
    out.backward()
    seen = data.grad.asnumpy()[0].tolist()
    print(name, "value", out.asnumpy().item(), "gradient", seen)
    assert seen == expected
EOF
