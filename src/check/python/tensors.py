"""Imports torch and runs a small program whose results are known. Argument: `cpu` or `cuda`. Prints one line of JSON. Python 3.8 and later."""
import faulthandler
import json
import sys
import time

faulthandler.enable()
wanted = sys.argv[1]
stage = "import"


def at(name):
    # The last such line tells where a crash was.
    global stage
    stage = name
    sys.stderr.write("tare-stage %s\n" % name)
    sys.stderr.flush()


def fail(what):
    raise AssertionError(what)


def close(got, expected, tolerance):
    return abs(got - expected) <= tolerance * max(1.0, abs(expected))


def matrix(rows, columns, a, b, c):
    # Small whole numbers: every product and sum is exact in float32, so there is one right answer.
    return [[(a * i + b * j) % c - c // 2 for j in range(columns)] for i in range(rows)]


def product(left, right):
    columns = list(zip(*right))
    return [[sum(x * y for x, y in zip(row, column)) for column in columns] for row in left]


def program(torch, device):
    facts = {}
    at("matrix product on %s" % device)
    left, right = matrix(24, 40, 3, 5, 11), matrix(40, 17, 7, 2, 13)
    expected = product(left, right)
    for dtype in ("float32", "float64"):
        x = torch.tensor(left, dtype=getattr(torch, dtype), device=device)
        y = torch.tensor(right, dtype=getattr(torch, dtype), device=device)
        if (x @ y).cpu().tolist() != [[float(v) for v in row] for row in expected]:
            fail("the product of two %s matrices of small whole numbers is wrong" % dtype)
    at("larger matrix product on %s" % device)
    n = 256
    ones = torch.ones(n, n, dtype=torch.float32, device=device)
    ramp = torch.arange(n, dtype=torch.float32, device=device)
    if (ones * ramp @ ones).sum().item() != float(n * n * (n * (n - 1) // 2)):
        fail("the sum of a %d x %d product is wrong" % (n, n))
    at("gradient on %s" % device)
    w = torch.tensor([1.0, -2.0, 3.0, 0.5], device=device, requires_grad=True)
    (w * w * w).sum().backward()
    if w.grad is None or w.grad.cpu().tolist() != [3.0, 12.0, 27.0, 0.75]:
        fail("the gradient of the sum of cubes is wrong: %s" % (None if w.grad is None else w.grad.cpu().tolist()))
    at("conversions on %s" % device)
    values = [0.0, 1.0, -1.5, 2.75, 100.0, -256.0]
    x = torch.tensor(values, dtype=torch.float32, device=device)
    for name in ("float64", "float16", "bfloat16"):
        kind = getattr(torch, name, None)
        if kind is None:
            continue
        back = x.to(kind).to(torch.float32).cpu().tolist()
        if back != values:
            fail("float32 to %s and back changes %s to %s" % (name, values, back))
    if x.to(torch.int32).cpu().tolist() != [0, 1, -1, 2, 100, -256]:
        fail("float32 to int32 is wrong: %s" % x.to(torch.int32).cpu().tolist())
    if (x > 1).cpu().tolist() != [False, False, False, True, True, False]:
        fail("a comparison is wrong")
    at("sum and sort on %s" % device)
    shuffled = torch.tensor([(i * 7919) % 1009 for i in range(1009)], dtype=torch.int64, device=device)
    if shuffled.sort().values.cpu().tolist() != list(range(1009)) or int(shuffled.sum()) != 1008 * 1009 // 2:
        fail("sorting or adding 1009 numbers is wrong")
    at("softmax on %s" % device)
    got = torch.softmax(torch.tensor([0.0, 1.0, 2.0], device=device), 0).cpu().tolist()
    for value, right_one in zip(got, (0.0900305732, 0.2447284711, 0.6652409558)):
        if not close(value, right_one, 1e-5):
            fail("softmax of 0, 1, 2 is wrong: %s" % got)
    facts["programs"] = 6
    return facts


result = {"ok": False, "device": wanted}
started = time.time()
try:
    at("import")
    import torch

    result["import_seconds"] = round(time.time() - started, 3)
    result["torch"] = str(getattr(torch, "__version__", ""))
    result["file"] = getattr(torch, "__file__", None)
    version = getattr(torch, "version", None)
    result["cuda"] = getattr(version, "cuda", None)
    result["hip"] = getattr(version, "hip", None)
    if wanted == "cpu":
        result.update(program(torch, "cpu"))
    else:
        at("initialise CUDA")
        result["available"] = bool(torch.cuda.is_available())
        if not result["available"]:
            try:
                torch.cuda.init()
                why = "torch.cuda.is_available() is False"
            except Exception as error:
                why = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            result["unavailable"] = why
        else:
            devices = []
            for index in range(torch.cuda.device_count()):
                at("device cuda:%d" % index)
                device = "cuda:%d" % index
                name = torch.cuda.get_device_name(index)
                capability = "%d.%d" % tuple(torch.cuda.get_device_capability(index))
                with torch.cuda.device(index):
                    facts = program(torch, device)
                    torch.cuda.synchronize(index)
                devices.append(dict(facts, index=index, name=name, capability=capability))
            result["devices"] = devices
            at("library versions")
            try:
                result["cudnn"] = torch.backends.cudnn.version()
            except Exception as error:
                fail("cuDNN does not load: %s" % error)
    result["ok"] = True
except BaseException as error:
    result["stage"] = stage
    result["kind"] = type(error).__name__
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    result["error"] = "\n".join(lines[:6])[:1500]
    cause = error.__cause__ or error.__context__
    if cause is not None:
        result["cause"] = ("%s: %s" % (type(cause).__name__, cause))[:600]
result["seconds"] = round(time.time() - started, 3)
print(json.dumps(result))
sys.stdout.flush()
