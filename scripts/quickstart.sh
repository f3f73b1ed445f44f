#!/usr/bin/env bash
# Trains the same mixture-of-experts model with stock Megatron-Core and with --megascale, and shows both side by side:
#     bash scripts/quickstart.sh [--data-path FILE_OR_FOLDER]
# Makes the environment first (.venv; a second run finds it). Without --data-path the text is the Python standard
# library's own sources. Writes out/quickstart/compare.json and compare.png.
set -euo pipefail

readonly OUT=out/quickstart
readonly STEPS=90 BLOCKS=9 # the loss falls by half

usage() { sed -n '2,5s/^# \{0,1\}//p' "$0"; }

refuse() {
    printf 'quickstart.sh: %s\n' "$1" >&2
    usage >&2
    exit 2
}

data_path=
while (($#)); do
    case $1 in
        --data-path)
            [[ -n ${2:-} ]] || refuse "--data-path needs a file or folder"
            data_path=$2
            shift
            ;;
        --data-path=*)
            data_path=${1#*=}
            [[ -n $data_path ]] || refuse "--data-path needs a file or folder"
            ;;
        -h | --help)
            usage
            exit
            ;;
        *) refuse "unknown argument $1" ;;
    esac
    shift
done
if [[ -n $data_path ]]; then
    [[ -r $data_path ]] || refuse "--data-path $data_path cannot be read"
    data_path=$(realpath -- "$data_path")
fi

cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup_env.sh
. .venv/bin/activate

mkdir -p "$OUT"
if [[ -z $data_path ]]; then
    data_path=$OUT/corpus.txt
    python scripts/build_corpus.py "$data_path" --max-bytes 2000000
fi
python scripts/compare_with_stock.py --preset quickstart --data-path "$data_path" --steps $STEPS --repeats $BLOCKS \
    --budget 25% --disk-path "$OUT" --limited-steps 3 --validate --json "$OUT/compare.json" --picture "$OUT/compare.png"
printf 'Written: %s and %s. Took %d s.\n' "$OUT/compare.json" "$OUT/compare.png" "$SECONDS"
