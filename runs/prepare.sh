#!/bin/sh
# Prepares what training on a GPU lease needs: corpus, edits, tokenizer, plan and lots to send.
# Usage: runs/prepare.sh FOLDER [MINUTES for Debian and npm] [PROJECTS of the package index] [VOCABULARY]
# Each step goes on where it was stopped. Two idle cores: about 35 minutes with the defaults.
set -eu
folder=$1 minutes=${2:-16} projects=${3:-2500} vocabulary=${4:-32768}
here=$(dirname "$0")/..
cases=""
for name in completion languages edits; do cases="$cases --without $here/bench/data/$name.jsonl.xz"; done
keystroke() { PYTHONPATH="$here/src:$here/lab" "${PYTHON:-python3}" -P -m keystroke "$@"; }
keystroke train sources "$folder" --minutes "$minutes"
keystroke train corpus "$folder" --projects "$projects" --late 0 --no-young --every-language $cases
keystroke train check "$folder" $cases
if [ "${EDITS:-1}" = 1 ]; then keystroke train edits "$folder" --projects 400 $cases; fi
keystroke train tokenizer "$folder" --out "$folder/tok" --vocabulary "$vocabulary" \
  --baseline "$here/models/keystroke-80m/tokenizer.json"
keystroke train plan "$folder" --out "$folder/plan.json" --lot "${LOT:-50}"
