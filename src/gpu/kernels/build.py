#!/usr/bin/env python3
"""Makes tare.ptx from tare.cu with NVRTC, NVIDIA's compiler library.

    pip download --no-deps -d /some/folder 'nvidia-cuda-nvrtc-cu11==11.7.99'
    unzip -d /some/folder/nvrtc /some/folder/nvidia_cuda_nvrtc_cu11-11.7.99-*.whl
    python3 src/gpu/kernels/build.py /some/folder/nvrtc/nvidia/cuda_nvrtc/lib/libnvrtc.so.11.2

Version 11.7 is old enough that drivers from 515 on can read its PTX (ISA 7.7), and still knows sm_52, the oldest
architecture that current drivers support. No GPU and no CUDA toolkit are needed. With `--check` nothing is written, and
the exit code is 1 where tare.ptx is not what would be.
"""

import ctypes
import pathlib
import sys

ARCHITECTURE = "compute_52"
RELEASE = (11, 7)
FOLDER = pathlib.Path(__file__).resolve().parent


def compile_to_ptx(library: str) -> str:
    # The library opens this one by its bare name; loaded first, it is found wherever it lies.
    for builtins in sorted(pathlib.Path(library).parent.glob("libnvrtc-builtins.so*")):
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    nvrtc = ctypes.CDLL(library)

    def call(name: str, *arguments) -> None:
        status = getattr(nvrtc, name)(*arguments)
        if status != 0:
            sys.exit(f"{name} failed with {status}")

    major, minor = ctypes.c_int(), ctypes.c_int()
    call("nvrtcVersion", ctypes.byref(major), ctypes.byref(minor))
    if (major.value, minor.value) != RELEASE:
        sys.exit(f"this is NVRTC {major.value}.{minor.value}, and the committed file is of {RELEASE[0]}.{RELEASE[1]}")

    program = ctypes.c_void_p()
    source = (FOLDER / "tare.cu").read_bytes()
    call("nvrtcCreateProgram", ctypes.byref(program), source, b"tare.cu", 0, None, None)
    options = [f"--gpu-architecture={ARCHITECTURE}".encode(), b"--std=c++14"]
    status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    size = ctypes.c_size_t()
    call("nvrtcGetProgramLogSize", program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    call("nvrtcGetProgramLog", program, log)
    text = log.value.decode()
    if text.strip():
        print(text, file=sys.stderr)
    if status != 0:
        sys.exit(f"nvrtcCompileProgram failed with {status}")
    call("nvrtcGetPTXSize", program, ctypes.byref(size))
    ptx = ctypes.create_string_buffer(size.value)
    call("nvrtcGetPTX", program, ptx)
    return ptx.value.decode()


def main() -> None:
    arguments = [argument for argument in sys.argv[1:] if argument != "--check"]
    if len(arguments) != 1:
        sys.exit(__doc__)
    made = compile_to_ptx(arguments[0])
    target = FOLDER / "tare.ptx"
    if "--check" in sys.argv[1:]:
        if not target.exists() or target.read_text() != made:
            sys.exit("tare.ptx is not what tare.cu compiles to")
        print("tare.ptx is current")
    else:
        target.write_text(made)
        print(f"wrote {target.name}: {len(made)} bytes")


if __name__ == "__main__":
    main()
