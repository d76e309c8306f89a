"""Records what torch's allocator does in a fixed scenario. Argument: the file for the snapshot. Prints one line of JSON. Python 3.8 and later."""
import faulthandler
import json
import sys

faulthandler.enable()
out = sys.argv[1]


def at(name):
    sys.stderr.write("tare-stage %s\n" % name)
    sys.stderr.flush()


result = {"ok": False}
try:
    at("import")
    import torch

    at("initialise CUDA")
    torch.cuda.init()
    device = "cuda:0"
    memory = torch.cuda.memory
    mib = 1 << 20
    torch.cuda.empty_cache()
    memory._record_memory_history(max_entries=200000)

    def take(count):
        return torch.empty(count, dtype=torch.uint8, device=device)

    at("small blocks")
    small = [take(size) for size in (1, 511, 512, 513, 4096, 65536, mib - 1, mib)]
    del small[1::2]
    small += [take(size) for size in (300, 700, 5000, 900000)]
    at("large blocks")
    large = [take(size) for size in (mib + 1, 3 * mib, 9 * mib, 10 * mib, 19 * mib, 20 * mib, 33 * mib)]
    # Holes of different sizes, then requests that fit into one of several.
    del large[1], large[2], large[3]
    large += [take(size) for size in (2 * mib, 8 * mib, 7 * mib, 6 * mib, 12 * mib)]
    at("many blocks")
    state, live = 12345, []
    for _ in range(600):
        state = (1103515245 * state + 12345) % (1 << 31)
        if live and state % 5 < 2:
            del live[state // 7 % len(live)]
        else:
            size = (1 << (state // 11 % 23)) + state % 777
            live.append(take(size))
    at("a second stream")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        other = [take(size) for size in (1000, 3 * mib, 15 * mib)]
        del other[0]
        other.append(take(2000))
    torch.cuda.synchronize()
    at("release of the cache")
    del live[::2]
    torch.cuda.empty_cache()
    live += [take(size) for size in (777, 5 * mib, 40 * mib)]
    at("snapshot")
    torch.cuda.synchronize()
    memory._dump_snapshot(out)
    memory._record_memory_history(enabled=None)
    result["torch"] = str(torch.__version__)
    result["ok"] = True
except BaseException as error:
    result["kind"] = type(error).__name__
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    result["error"] = "\n".join(lines[:6])[:1500]
print(json.dumps(result))
sys.stdout.flush()
