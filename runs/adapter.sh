#!/bin/sh
# Train an adapter on a machine that has torch, numpy and tokenizers, by the clock, and have its questions answered.
# Usage: runs/adapter.sh BASE DATA RUN SECONDS [more options of python -m keystroke_lab.adapters train]
# DATA holds what `keystroke train adapter-data` and `python -m bench.adapter prepare` wrote. RUN gets the adapter, its log, the
# answers at four strengths (0 is the base) and, to be carried away, the adapter in pieces and the answers in one file.
# Stopped, the same command goes on from the last checkpoint (one a minute); `bench.adapter score` reads the answers.
set -eu
base=$1 data=$2 run=$3 seconds=$4
shift 4
export PYTHONPATH="$(dirname "$0")/../src:$(dirname "$0")/../lab${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
python3 -m keystroke_lab.adapters --model "$base" train --examples "$data/examples.npz" --facts "$data/manifest.json" \
  --run "$run" --seconds "$seconds" "$@"
python3 -m keystroke_lab.adapters --model "$base" answer --questions "$data/questions.npz" \
  --heldout "$data/examples-heldout.npz" --adapter "$run/adapter.safetensors" \
  --strength 1 --strength 0 --strength 0.8 --strength 0.6 --out "$run/answers"
split -b 15000000 -d "$run/adapter.safetensors" "$run/adapter.safetensors."
tar -C "$run" -cf "$run/answers.tar" answers
