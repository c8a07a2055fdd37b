#!/bin/sh
# Checks and measures the project on a GPU: see docs/how-to/gpu.md. PYTHON names the interpreter that has torch.
root=$(cd "$(dirname "$0")/../.." && pwd)
if [ -z "$PYTHON" ]; then
  PYTHON=python3
  [ -x "$root/.venv/bin/python" ] && PYTHON=$root/.venv/bin/python
fi
exec "$PYTHON" "$root/tests/gpu/checks.py" "$@"
