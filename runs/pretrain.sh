#!/bin/sh
# Train on a machine that has torch, numpy and tokenizers, for a number of minutes by the clock.
# Usage: runs/pretrain.sh DATA TOKENIZER RUN HELDOUT MINUTES
# DATA may still be filling while training runs; RUN/deadline (Unix seconds) may be moved. Run it again to go on.
set -eu
PYTHONPATH="$(dirname "$0")/../src" PYTHONUNBUFFERED=1 exec python3 -m keystroke.train \
  --data "$1" --tokenizer "$2" --run "$3" --heldout "$4" --minutes "$5" --workers "${WORKERS:-10}"
