#!/bin/bash
# Expected: mx.sym.Activation(x, act_type='tanh') and mx.sym.tanh(x) are one function, and cost the same in training.
# (Guess: the same plan; with oneDNN perhaps other last bits.)
# Seen, between two pointwise operators, on arrays of 32 MiB: tanh(x) is planned with 96 MiB and takes 96 MiB. Activation is
# planned with 128 MiB and takes 160: its gradient keeps one array more, and oneDNN computes it into memory of its own
# although the plan says in place.
# MXNet 1.9.1 on a CPU. Gluon's Activation layers, and those of the model zoo, are the operator that takes more.
# Hurts: whoever counts memory by the executor's "Total N MB allocated", on a CPU. Write tanh(x) and relu(x).
# Source: Activation's gradient reads inputs too where oneDNN is built in (src/operator/nn/activation.cc); CreateMKLDNNMem
# without the array that it may overwrite (src/operator/nn/mkldnn/mkldnn_base.cc). Resident memory is read from /proc: Linux
# only.
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
import re

import mxnet as mx


def resident():
    with open("/proc/self/status") as file:
        return int(re.search(r"VmRSS:\s+(\d+)", file.read())[1]) / 1024


kept = []


def planned_and_taken(function):
    net = mx.sym.MakeLoss(mx.sym.softsign(function(mx.sym.Variable("data") * 1.5)))
    for shape in ((4, 8, 8, 8), (8, 16, 256, 256)):  # the first loads what runs it
        executor = net.simple_bind(mx.cpu(), data=shape)
        for array in executor.arg_arrays + executor.grad_arrays:
            array[:] = 0.1
        mx.nd.waitall()
        before = resident()
        for _ in range(2):
            executor.forward(is_train=True)
            executor.backward()
            mx.nd.waitall()
        kept.append(executor)
    return int(re.search(r"Total (\d+) MB allocated", executor.debug_str())[1]), resident() - before


print("mxnet", mx.__version__, "| MiB planned and taken, arrays of 32")
by_function = planned_and_taken(mx.sym.tanh)
by_operator = planned_and_taken(lambda x: mx.sym.Activation(x, act_type="tanh"))
print("function tanh", by_function, "| Activation with tanh", by_operator)
assert by_function[0] == 96 and abs(by_function[1] - 96) < 8
assert by_operator[0] == 128 and abs(by_operator[1] - 160) < 8
EOF
