#!/bin/sh
# tare against `uv pip install` of the same pins into a fresh environment, both from a warm cache.
#
# Usage: benches/wheels.sh TARE UV PYTHON ENVIRONMENT.yml [ROUNDS]
#   TARE             a release build
#   UV               the uv program
#   PYTHON           the interpreter for uv's virtual environment; of the same minor version as in the file
#   ENVIRONMENT.yml  conda half: python (and pip) only; `pip:` with exact pins, so that neither side resolves anything of note
#
# Printed for each round, in seconds: tare as it is (with byte code), tare --no-compile, uv --compile-bytecode, uv as it is. tare's time includes its conda half;
# the last line tells how long that alone takes, to be taken off. Caches and environments are made below a temporary folder, on one file system.
set -eu
[ $# -ge 4 ] || { sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 2; }
tare=$1 uv=$2 python=$3 file=$4 rounds=${5:-5}
work=$(mktemp -d "${TMPDIR:-/tmp}/tare-bench-XXXXXX")
trap 'rm -rf "$work"' EXIT INT TERM
export TARE_CACHE_DIR="$work/cache-tare" UV_CACHE_DIR="$work/cache-uv" UV_LINK_MODE=hardlink
# The lines of the pip section, and the file without it.
sed -n '/^ *- pip:/,$s/^ *- \([^:]*\)$/\1/p' "$file" > "$work/pins.txt"
sed '/^ *- pip:/,$d' "$file" > "$work/conda.yml"
now() { date +%s.%N; }
took() { # START: seconds since then
    awk -v a="$1" -v b="$(now)" 'BEGIN { printf "%.2f", b - a }'
}
with_tare() { # FILE, options
    rm -rf "$work/env"
    of=$1; shift
    start=$(now)
    "$tare" create -p "$work/env" -f "$of" "$@" >/dev/null 2>"$work/log" || { cat "$work/log" >&2; exit 1; }
    took "$start"
}
with_uv() { # options
    rm -rf "$work/venv"
    "$uv" venv -q --python "$python" "$work/venv"
    start=$(now)
    "$uv" pip install -q --no-deps --python "$work/venv/bin/python" -r "$work/pins.txt" "$@" 2>"$work/log" || { cat "$work/log" >&2; exit 1; }
    took "$start"
}
"$uv" --version
"$tare" --version
echo "pins: $(grep -c . "$work/pins.txt")"
# The first round fills the caches and does not count.
with_tare "$file" >/dev/null; with_uv >/dev/null
echo "round tare tare-no-compile uv-compile uv"
for round in $(seq "$rounds"); do
    echo "$round $(with_tare "$file") $(with_tare "$file" --no-compile) $(with_uv --compile-bytecode) $(with_uv)"
done
echo "conda half alone: $(with_tare "$work/conda.yml") with byte code, $(with_tare "$work/conda.yml" --no-compile) without"
