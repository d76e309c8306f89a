"""Whether `del`, `gc.collect()` and `empty_cache()` give everything back. Prints one line of JSON. Python 3.8 and later."""
import faulthandler
import gc
import json
import sys

faulthandler.enable()


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

    def measure():
        torch.cuda.synchronize()
        return {"allocated": int(torch.cuda.memory_allocated(0)), "reserved": int(torch.cuda.memory_reserved(0))}

    def product():
        a = torch.ones(512, 512, device=device)
        return float((a @ a).sum().item())

    at("first matrix product")
    before = measure()
    product()
    gc.collect()
    torch.cuda.empty_cache()
    # cuBLAS and its like keep a workspace from the first product on: the baseline is taken with it.
    result["start"] = before
    result["baseline"] = measure()
    at("work")
    layers = [torch.randn(1024, 1024, device=device, requires_grad=True) for _ in range(6)]
    x = torch.randn(256, 1024, device=device)
    y = x
    for layer in layers:
        y = torch.relu(y @ layer)
    loss = y.float().pow(2).mean()
    loss.backward()
    extra = [torch.empty(size, dtype=torch.uint8, device=device) for size in (1, 1000, 1 << 20, 7 << 20, 64 << 20)]
    # A ring of references that only the garbage collector ends.
    ring = {"tensor": torch.zeros(3 << 20, dtype=torch.uint8, device=device)}
    ring["self"] = ring
    result["busy"] = measure()
    at("release")
    del layers, layer, x, y, loss, extra, ring
    gc.collect()
    torch.cuda.empty_cache()
    result["after"] = measure()
    at("holders")
    # What still holds memory is named by the package that does so in notebooks.
    if result["after"] != result["baseline"] and len(sys.argv) > 1:
        try:
            sys.path.insert(0, sys.argv[1])
            import tare_notebook

            tare_notebook.settle()
            torch.cuda.empty_cache()
            result["after"] = measure()
            result["holders"] = [holder.as_dict() for holder in tare_notebook.holders(globals())]
        except Exception as error:
            result["no_holders"] = "%s: %s" % (type(error).__name__, error)
    at("workspaces")
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    result["can_clear_workspaces"] = clear is not None
    if clear is not None:
        clear()
        gc.collect()
        torch.cuda.empty_cache()
        result["without_workspaces"] = measure()
    result["torch"] = str(torch.__version__)
    result["ok"] = True
except BaseException as error:
    result["kind"] = type(error).__name__
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    result["error"] = "\n".join(lines[:6])[:1500]
print(json.dumps(result))
sys.stdout.flush()
