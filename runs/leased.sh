#!/bin/sh
# Resumable training on a short GPU lease. The machine needs torch, numpy, tokenizers, msgspec, ast-grep-py and platformdirs.
# Usage: runs/leased.sh FOLDER [options of python -m keystroke_lab.pretraining.leased]
# FOLDER holds plan.json, tok/, pieces/ (may still be filling), heldout/ and run/; the same command goes on.
set -eu
folder=$1
shift
here=$(dirname "$0")/..
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$folder/inductor}"  # a second start compiles nothing
PYTHONPATH="$here/src:$here/lab${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 exec "${PYTHON:-python3}" -m keystroke_lab.pretraining.leased "$folder/plan.json" \
  --data "$folder/pieces" --tokenizer "$folder/tok" --run "${RUN:-$folder/run}" --heldout "$folder/heldout" \
  --workers "${WORKERS:-13}" "$@"
