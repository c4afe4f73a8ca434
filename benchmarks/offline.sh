#!/usr/bin/env bash
# Collects in .gpu/ (44 MB) what the GPU benchmarks need beside jax, flax, optax, chex, orbax and
# grpcio, cut down to Atari, for a machine with Python 3.12 and without network:
#
#     bash benchmarks/offline.sh                      # here; then copy the repository with .gpu/
#     PYTHONPATH=$PWD/.gpu python3 benchmarks/gpu.py  # there
#
# jax, jaxlib and NumPy are left out, as they would replace the machine's builds for GPUs.
set -eu
cd "$(dirname "$0")/.."
wheels=$(mktemp -d)
trap 'rm -rf "$wheels"' EXIT
platforms=$(printf -- '--platform manylinux_%s_x86_64 ' 2_28 2_27 2_17; echo --platform manylinux2014_x86_64)
python3 -m pip download --quiet --no-deps --only-binary :all: --python-version 3.12 \
  --implementation cp $platforms --dest "$wheels" mctx==0.0.71 envpool==1.2.5 \
  envpool-assets==0.3.0 gymnasium==1.4.0 farama-notifications==0.0.6 dm-env==1.6 dm-tree==0.1.10 \
  optree==0.20.0 tensorboardX==2.6.5 pillow==$(sed -n 's/^pillow==\([^ ]*\).*/\1/p' requirements.lock)
for wheel in "$wheels"/*.whl; do python3 -m zipfile -e "$wheel" "$wheels/site"; done
rm -rf .gpu
mkdir -p .gpu/envpool .gpu/envpool_assets
(
  cd "$wheels/site"
  cp -r PIL pillow.libs dm_env farama_notifications gymnasium mctx tensorboardX optree tree \
    ./*.dist-info "$OLDPWD/.gpu"
  cp -r envpool/*.py envpool/python envpool/atari "$OLDPWD/.gpu/envpool"
  cp -r envpool_assets/__init__.py envpool_assets/atari "$OLDPWD/.gpu/envpool_assets"
)
du -sh .gpu
