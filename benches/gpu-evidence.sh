#!/bin/sh
# Everything that only a real GPU can show, in one command; prints what docs/gpu-evidence.md records.
#
#   cargo build --release && benches/gpu-evidence.sh [PYTHON] [FOLDER]
#
# PYTHON has torch built for the card (default: python3); FOLDER takes reports and recordings (default: target/gpu-evidence). Takes about fifteen
# minutes and the free memory of every card. Each line is `ok` or `NOT OK`; the exit code is the number of lines that are not.
set -u
tare=${TARE:-target/release/tare}
python=${1:-python3}
out=${2:-target/gpu-evidence}
mkdir -p "$out" || exit 2
failures=0

try() {
    name=$1
    shift
    start=$(date +%s)
    "$@" >"$out/$name.txt" 2>"$out/$name.err"
    code=$?
    if [ $code -eq 0 ]; then verdict=ok; else verdict="NOT OK ($code)"; failures=$((failures + 1)); fi
    echo "$verdict  $name  $(($(date +%s) - start)) s"
}

try info "$tare" gpu info
cat "$out/info.txt"
for level in quick standard; do
    for kind in native expandable; do
        try "selftest-$level-$kind" "$tare" gpu selftest --level $level --$kind --require-gpu
    done
done
try selftest-quick-json "$tare" gpu selftest --level quick --require-gpu --json
try selftest-thorough "$tare" gpu selftest --level thorough --budget 5m --require-gpu
tail -n 40 "$out/selftest-standard-native.txt" "$out/selftest-thorough.txt"
try check "$tare" check --python "$python" --require-gpu
try check-json "$tare" check --python "$python" --require-gpu --format json -o "$out/check.json"
cat "$out/check.txt"

# Recordings of torch's allocator beyond its default configuration, replayed address for address.
cat >"$out/record.py" <<'PY'
import sys
import torch

kind, path = sys.argv[1:]
memory = torch.cuda.memory
torch.cuda.init()
memory._record_memory_history(max_entries=100000)
mib = 1 << 20
live = []
state = 99
for step in range(1500):
    state = (1103515245 * state + 12345) % (1 << 31)
    if live and state % 5 < 2:
        del live[state // 7 % len(live)]
    else:
        live.append(torch.empty((1 << (state // 11 % 26)) + state % 999, dtype=torch.uint8, device="cuda"))
    if kind == "emptied" and step % 300 == 299:
        torch.cuda.empty_cache()
if kind == "oom":
    try:
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError as error:
        print(str(error)[:200])
    live.append(torch.empty(5 * mib, dtype=torch.uint8, device="cuda"))
torch.cuda.synchronize()
memory._dump_snapshot(path)
PY
for kind in plain emptied oom; do
    for settings in '' expandable_segments:True max_split_size_mb:64; do
        row=$kind-$(echo "${settings:-default}" | tr -c 'A-Za-z0-9\n' -)
        try "record-$row" env PYTORCH_ALLOC_CONF="$settings" PYTORCH_CUDA_ALLOC_CONF="$settings" "$python" "$out/record.py" "$kind" "$out/$row.pickle"
        try "replay-$row" "$tare" gpu replay "$out/$row.pickle"
        grep -i -m 3 'address' "$out/replay-$row.txt"
    done
done
echo "$failures not ok; reports in $out"
exit $failures
