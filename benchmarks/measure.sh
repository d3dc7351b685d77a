#!/usr/bin/env bash
# All figures of docs/performance-diary.md, one after the other: benchmarks/measure.sh FOLDER
# On a machine with nothing else to do. About 30 minutes; peers run beside where `make peers` has prepared them.
set -euo pipefail
into=${1:?name a folder for the results}
cd "$(dirname "$0")/.."
mkdir -p "$into"

measure() {
  local name=$1
  shift
  echo "== $name" >&2
  .venv/bin/kvtier bench "$@" --json --plot "$into/$name.svg" > "$into/$name.json" 2> >(tee "$into/$name.txt" >&2)
}

export COLUMNS=120
measure paths-2mib paths --rounds 25
measure paths-360kib paths --payload-bytes 368640 --batch 190 --rounds 25
measure tiers tiers
measure clients clients
measure hash hash
measure block-pool block-pool
measure codec codec
measure ttft ttft
