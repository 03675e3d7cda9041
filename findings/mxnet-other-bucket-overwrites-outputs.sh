#!/bin/bash
# Expected: an array that BucketingModule.get_outputs() returned keeps its numbers while another bucket runs: that is another
# executor.
# (Guess: it does; only the same bucket may overwrite it.)
# Seen: the executors of the buckets share one pool, outputs included. After a run of the shorter bucket the first rows of the
# longer bucket's output hold the shorter one's numbers. Executor.reshape shares inputs too: writing the data of the new
# executor changes the data of the old one.
# MXNet 1.9.1.
# Hurts: evaluation that collects outputs over buckets and converts them at the end, teacher-student steps, ensembling by
# shape. Copy at once: get_outputs()[0].copy() or asnumpy().
# Source: shared_exec of simple_bind and shared_data_arrays (src/executor/graph_executor.cc, module/executor_group.py).
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
import numpy as np


def network(length):
    return mx.sym.square(mx.sym.Variable("data") + 1), ["data"], None


def run(module, length, value):
    data = mx.nd.full((4, length), value)
    batch = mx.io.DataBatch([data], bucket_key=length, provide_data=[("data", data.shape)])
    module.forward(batch, is_train=False)
    return module.get_outputs()[0]


module = mx.mod.BucketingModule(network, default_bucket_key=4)
module.bind([("data", (4, 4))], for_training=False)
module.init_params()
of_long = run(module, 4, 1.0)
before = of_long.asnumpy()
run(module, 2, 9.0)
mx.nd.waitall()
after = of_long.asnumpy()
print("mxnet", mx.__version__, "| long bucket's output before", before[0], "after the short one ran", after[0], after[3])
assert (before == 4).all() and (after[:2] == 100).all() and (after[2:] == 4).all()

old = mx.sym.square(mx.sym.Variable("data")).simple_bind(mx.cpu(), data=(4, 2))
old.arg_dict["data"][:] = 1
new = old.reshape(data=(2, 2))
new.arg_dict["data"][:] = 3
print("data of the executor that was reshaped:", old.arg_dict["data"].asnumpy().tolist())
assert np.array_equal(old.arg_dict["data"].asnumpy(), [[3, 3], [3, 3], [1, 1], [1, 1]])
EOF
