#!/bin/bash
# Expected: forward(is_train=True) trains: Dropout drops, whatever the script calls afterwards.
# (Guess: calls of one executor run in their order, each in its own mode.)
# Seen: forward(is_train=False), called while the training pass still waits in the engine, turns the Dropout of that pass off:
# of outputs that were copied in between, 0 of a half are dropped. With mx.nd.waitall() before the second call, a half is.
# A Gluon block, with static_alloc too, keeps the mode of each call.
# MXNet 1.9.1, on a CPU.
# Hurts: Module scripts that predict after each batch without reading a result first (metrics every N batches): they train
# with less Dropout, more so on a slow machine, and no two runs agree. Call waitall() before you predict.
# Source: the executor writes is_train into the context of its operators when it is called, and they read it when they run
# (GraphExecutor::RunOps, src/executor/graph_executor.cc).
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
net = mx.sym.Variable("data")
for layer in range(6):  # a second of work before the Dropout
    net = mx.sym.FullyConnected(net, num_hidden=2000, name="layer%d" % layer)
net = mx.sym.Dropout(net, p=0.5)
dropped = {}
for waits in (True, False):
    executor = net.simple_bind(mx.cpu(), data=(2000, 2000))
    for array in executor.arg_arrays:
        array[:] = 1
    mx.nd.waitall()
    trained = executor.forward(is_train=True)[0].copy()
    if waits:
        mx.nd.waitall()
    executor.forward(is_train=False)
    dropped[waits] = (trained.asnumpy() == 0).mean()
    print("waited before the prediction:", waits, "| dropped by the training pass:", round(dropped[waits], 2))
assert abs(dropped[True] - 0.5) < 0.01 and dropped[False] == 0
EOF
