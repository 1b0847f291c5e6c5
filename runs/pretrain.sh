#!/bin/sh
# Train on a machine that has torch, numpy, tokenizers, ast-grep-py and platformdirs, for a number of minutes by the clock.
# Usage: runs/pretrain.sh DATA EDITS TOKENIZER RUN HELDOUT MINUTES [more options of python -m keystroke_lab.pretraining]
# DATA and EDITS may still be filling while training runs; RUN/deadline (Unix seconds) may be moved. Run it again to go on.
set -eu
data=$1 edits=$2 tokenizer=$3 run=$4 heldout=$5 minutes=$6
shift 6
PYTHONPATH="$(dirname "$0")/../src:$(dirname "$0")/../lab${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 exec python3 -m keystroke_lab.pretraining \
  --data "$data" --edits "$edits" --tokenizer "$tokenizer" --run "$run" --heldout "$heldout" --minutes "$minutes" \
  --workers "${WORKERS:-10}" "$@"
