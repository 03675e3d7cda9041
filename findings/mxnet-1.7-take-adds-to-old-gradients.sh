#!/bin/bash
# Expected: the gradient of take is written anew in each backward pass, along any axis; grad_req 'write' says so.
# (Guess: right since ever.)
# Seen: along any axis but 0 it is added to what the memory holds. Three backward passes with 'write' give 1, 2 and 3; an
# executor's array that held 7 holds 8. Behind another operator that memory is the pool's: gradients there were 2e+36 or NaN,
# or looked sound, by what ran before. take along axis 0, pick and gather_nd are right.
# MXNet 1.7.0 (1.5.1 and 1.6.0 the same); 1.9.1 is right.
# Hurts: attention and gathers along time on these versions, and whoever compares old results with new ones: training that
# differs from run to run. Move the axis to the front and take there, or use gather_nd.
# Source: measured; TakeOpBackward of 1.9.1 (src/operator/tensor/indexing_op.h) clears the array first where it writes.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
export OMP_NUM_THREADS=1 MXNET_SUBGRAPH_VERBOSE=0
python=
for version in 3.8; do
    for candidate in "python$version" "$HOME"/.pyenv/versions/"$version".*/bin/python; do
        if "$candidate" -c "import sys; sys.exit('%d.%d' % sys.version_info[:2] != '$version')" 2>/dev/null; then
            python=$candidate
            break 2
        fi
    done
done
[ -n "$python" ] || { echo "needs Python 3.8" >&2; exit 2; }
"$python" -m venv venv
venv/bin/pip install -q --disable-pip-version-check --no-compile mxnet==1.7.0.post2 numpy==1.18.5 graphviz==0.8.4 'requests<3'
venv/bin/python - <<'EOF'
import mxnet as mx
from mxnet import autograd, nd

print("mxnet", mx.__version__, "| first row of the gradient, three passes with grad_req 'write'")
indices = nd.array([0, 1])
seen = {}
for name, compute in (
    ("take, axis 1", lambda x: nd.take(x, indices, axis=1)),
    ("take, axis 0 of the transpose", lambda x: nd.take(x.T, indices, axis=0)),
    ("pick", lambda x: nd.pick(x, nd.array([0, 0, 0]), axis=1)),
):
    data = nd.ones((3, 4))
    data.attach_grad("write")
    seen[name] = []
    for _ in range(3):
        with autograd.record():
            out = compute(data)
        out.backward()
        seen[name].append(data.grad.asnumpy()[0].tolist())
    print(name, seen[name])
assert seen["take, axis 1"] == [[n, n, 0, 0] for n in (1, 2, 3)]
assert seen["take, axis 0 of the transpose"] == [[1, 1, 0, 0]] * 3
assert seen["pick"] == [[1, 0, 0, 0]] * 3
net = mx.sym.take(mx.sym.Variable("data"), mx.sym.Variable("indices"), axis=1)
executor = net.simple_bind(mx.cpu(), grad_req={"data": "write", "indices": "null"}, data=(3, 4), indices=(2,))
executor.arg_dict["indices"][:] = indices
executor.grad_dict["data"][:] = 7
executor.forward(is_train=True)
executor.backward([nd.ones((3, 2))])
by_executor = executor.grad_dict["data"].asnumpy()[0].tolist()
print("executor, the gradient's array held 7:", by_executor)
assert by_executor == [8, 8, 7, 7]
EOF
