#!/usr/bin/env bash
# Builds Horovod against the torch of a Python and installs it there: deploy/build-horovod.sh [PYTHON]
#
# PYTHON is .venv/bin/python unless given. Gloo is always built in, Open MPI where mpicxx is there. The wheel is
# kept in the user's cache, under what it was built for, so that a second run takes seconds; the first takes a few
# minutes. Needs cmake and g++; pip fetches the source from the package index that it is configured for, and takes it
# only with the digest below.
set -euo pipefail

version=0.28.1
sha256=92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0 # of its source; Spack records the same
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
patch=$here/horovod-$version.patch
python=${1:-$here/../.venv/bin/python}

die() {
  echo "build-horovod: $*" >&2
  exit 1
}

if [ $# -gt 1 ] || [[ ${1:-} == -* ]]; then die "usage: $0 [PYTHON]"; fi
found=$(type -P "$python") || die "there is no Python at $python: run 'make setup' first, or name another"
python=$(cd "$(dirname "$found")" && pwd)/$(basename "$found") # not resolved: a link into a .venv is the .venv
torch=$("$python" -c 'import torch; print(torch.__version__)') || die "$python has no torch to build against"
absent=$("$python" -c '
import importlib.util as u
print(*(p for m, p in {"cloudpickle": "cloudpickle", "packaging": "packaging", "psutil": "psutil", "yaml": "pyyaml"}.items() if not u.find_spec(m)))')
[ -z "$absent" ] || die "$python lacks what Horovod needs when it runs: $python -m pip install $absent"
abi=$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("SOABI"))')
mpi=nompi
if type -P mpicxx >/dev/null; then mpi=mpi-$(mpicxx -show | cksum | cut -d' ' -f1); fi

key=$version-torch$torch-$abi-$mpi-$(sha256sum <"$patch" | cut -c1-8)
cache=${XDG_CACHE_HOME:-${HOME:?is not set: where to keep the wheel}/.cache}/ray-ensemble/horovod
mkdir -p "$cache"
exec 9>"$cache/lock"
if ! flock -n 9; then
  echo "build-horovod: another build is under way; waiting for it"
  flock 9
fi

build() {
  local work=$1 tool
  for tool in cmake g++ make patch; do
    type -P "$tool" >/dev/null || die "$tool is needed (Debian: apt-get install cmake g++ make patch)"
  done
  # setup.py of Horovod runs without isolation: it must see this torch.
  "$python" -c 'import setuptools' 2>/dev/null || die "setuptools is needed: $python -m pip install setuptools"
  # The digest is compared before anything of the source is run.
  echo "horovod==$version --hash=sha256:$sha256" >"$work/source"
  "$python" -m pip download -qq --no-deps --no-build-isolation --no-binary horovod -d "$work" --require-hashes \
    -r "$work/source" || die "pip could not download the source of horovod $version with the sha256 $sha256"
  tar -xzf "$work/horovod-$version.tar.gz" -C "$work"
  patch -s -p1 -d "$work/horovod-$version" <"$patch" || die "$patch does not fit the source"
  unset MAKELEVEL MFLAGS # of the `make` that may have called this
  export MAKEFLAGS
  MAKEFLAGS=-j$(nproc)
  export HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_GLOO=1
  if [ "$mpi" = nompi ]; then export HOROVOD_WITHOUT_MPI=1; else export HOROVOD_WITH_MPI=1; fi
  if ! "$python" -m pip wheel -v --no-deps --no-build-isolation --no-cache-dir -w "$work/wheel" \
    "$work/horovod-$version" >"$work/log" 2>&1; then
    grep -E '(error|Error)[: ]' "$work/log" | head -n 20 >&2 || true
    cp "$work/log" "$cache/$key.log"
    die "the build failed; all it said is in $cache/$key.log"
  fi
}

if [ ! -d "$cache/$key" ]; then
  echo "build-horovod: building $version against torch $torch, with Gloo$([ "$mpi" = nompi ] || echo " and MPI")"
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  build "$work"
  rm -rf "$cache/$key.part"
  cp -r "$work/wheel" "$cache/$key.part"
  mv "$cache/$key.part" "$cache/$key"
fi
"$python" -m pip install -qq --no-deps --no-index --force-reinstall "$cache/$key"/horovod-*.whl
# Not from here: a directory of the name would be taken for the package.
cd /
"$python" -c '
import horovod, horovod.torch as hvd
built = [name for name in ("gloo", "mpi", "nccl") if getattr(hvd, name + "_built")()]
print("build-horovod: horovod", horovod.__version__, "with", " and ".join(built))' ||
  die "what was built does not run; remove $cache/$key and build again"
