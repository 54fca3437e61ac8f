#!/bin/sh
# Collect the wheels that tools/gpu_proof.py needs on a machine with a GPU and torch, but without a network:
# ours, built from this checkout, and the libraries that we and our tests use. 30 MB at most, or it fails.
# usage: tools/gpu_wheels.sh FOLDER [PYTHON_VERSION, such as 3.12; default: that of python]
set -eu
folder=$1
version=${2:-$(python -c 'import platform; print(".".join(platform.python_version_tuple()[:2]))')}
root=$(cd "$(dirname "$0")/.." && pwd)
mkdir -p "$folder"
for project in "$root" "$root"/backends/* "$root"/contrib/*; do
    if [ -f "$project/pyproject.toml" ]; then
        python -m uv build --quiet --wheel --out-dir "$folder" "$project"
    fi
done
python -m pip download --quiet --no-deps --only-binary :all: --python-version "$version" --dest "$folder" \
    --constraint "$root/constraints.txt" \
    attrs cattrs click hypothesis iniconfig markdown-it-py mdurl nvidia-ml-py packaging pluggy pygments pytest \
    pytest-timeout pyyaml rich safetensors sortedcontainers torchao typing-extensions xxhash
kilobytes=$(du -sk "$folder" | cut -f1)
echo "$folder: $kilobytes kB"
[ "$kilobytes" -le 30000 ] || { echo "more than 30 MB" >&2; exit 1; }
