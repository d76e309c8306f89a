"""In a real Jupyter kernel: planted holders, clean notebooks, errors, outputs, tasks. Skipped where ipykernel and jupyter_client are not there.

TARE_TEST_TORCH=real takes the torch of the environment, on the CPU; TARE_TEST_KERNEL names a kernelspec (`python3` otherwise).
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, HERE)

import clean  # noqa: E402
import planted  # noqa: E402

try:
    import ipykernel  # noqa: F401
    from jupyter_client.manager import KernelManager
except ImportError:
    KernelManager = None  # type: ignore[assignment,misc]

REAL = os.environ.get("TARE_TEST_TORCH", "standin") == "real"
KERNEL = os.environ.get("TARE_TEST_KERNEL", "python3")
#: A part of the planted holders and notebooks, for every build; all of them by hand.
QUICK = bool(os.environ.get("TARE_TEST_QUICK"))
INSTALLED = bool(os.environ.get("TARE_TEST_INSTALLED"))


class Kernel:
    """A kernel and what its cells answered."""

    def __init__(self, folder):
        path = [] if INSTALLED else [os.path.dirname(HERE)]
        path += [] if REAL else [os.path.join(HERE, "standin")]
        env = dict(os.environ, PYTHONPATH=os.pathsep.join(path), IPYTHONDIR=folder, TARE_EXPERIMENTS=os.path.join(folder, "log.jsonl"))
        env.pop("TARE_BINARY", None)
        self.manager = KernelManager(kernel_name=KERNEL)
        self.manager.start_kernel(env=env, cwd=folder)
        self.client = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=120)

    def run(self, code):
        """The text of everything that a cell showed, and its error's name."""
        shown, failed = [], []

        def hook(message):
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                shown.append(content["text"])
            elif kind in ("display_data", "execute_result"):
                shown.append(content["data"].get("text/plain", ""))
            elif kind == "error":
                failed.append(content["ename"])

        self.client.execute_interactive(code, timeout=300, output_hook=hook, store_history=True)
        return "".join(shown), failed[0] if failed else None

    def value(self, code):
        """What an expression is, through JSON."""
        text, failed = self.run(f"import json as _json; print('@' + _json.dumps({code}))")
        assert failed is None, (failed, text)
        return json.loads(text.split("@", 1)[1])

    def stop(self):
        self.client.stop_channels()
        self.manager.shutdown_kernel(now=True)


@unittest.skipIf(KernelManager is None, "ipykernel and jupyter_client are not installed")
class InKernel(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.folder = tempfile.mkdtemp(prefix="tare-kernel-")
        cls.kernel = Kernel(cls.folder)
        cls.device = "cpu" if REAL else "cuda"
        cls.kernel.run("%load_ext tare_notebook")

    @classmethod
    def tearDownClass(cls):
        cls.kernel.stop()
        shutil.rmtree(cls.folder, ignore_errors=True)

    def setUp(self):
        self.kernel.run("%tare zero")

    def run_ok(self, code):
        text, failed = self.kernel.run(code)
        self.assertIsNone(failed, f"{code}\n{text}")
        return text

    def begin(self):
        self.run_ok(clean.FIRST.format(device=self.device))

    def holders(self):
        found = self.kernel.value("[h.as_dict() for h in __import__('tare_notebook').holders()]")
        return [one for one in found if one["kind"] != "library"]

    def test_planted(self):
        for case in planted.PLANTED[:: 4 if QUICK else 1]:
            if case.only == "standin" and REAL:
                continue
            with self.subTest(case.name):
                self.begin()
                self.run_ok(planted.PRELUDE)
                self.run_ok(case.source)
                mine = [one for one in self.holders() if one["kind"] == case.kind]
                self.assertEqual(len(mine), 1, self.holders())
                self.assertTrue(mine[0]["where"].startswith(case.where), mine)
                if case.kind != "DataLoader workers":
                    self.assertLess(abs(mine[0]["bytes"] - case.mib * planted.MIB), 64 * 1024, mine)
                # Only what C++ holds has no line.
                self.assertEqual(mine[0]["release"] is None, case.kind == "C++", mine)
                if mine[0]["release"]:
                    self.run_ok(mine[0]["release"])
                if case.after:
                    self.run_ok(case.after)
                self.assertEqual([one for one in self.holders() if one["kind"] == case.kind], [])
                self.run_ok("sys.modules.pop('planted_mod', None); sys.modules.pop('wandb', None); None")
                text = self.run_ok("%tare zero")
                self.assertIn("ZERO:", text)

    def test_clean_notebooks(self):
        for number, cells in enumerate(clean.notebooks()[:: 5 if QUICK else 1]):
            with self.subTest(number=number, cells=cells):
                self.begin()
                for cell in cells:
                    # A cell may only fail where it is written to, or it would leave nothing behind for the wrong reason.
                    text, failed = self.kernel.run(cell)
                    self.assertIn(failed, (None, "ValueError", "ZeroDivisionError"), f"{cell}\n{text}")
                text = self.run_ok("%tare zero")
                self.assertIn("ZERO:", text)
                self.assertNotIn("HELD", text)

    def test_error_that_holds_a_tensor_is_found_and_released(self):
        self.begin()
        _, failed = self.kernel.run("def f():\n    big = torch.zeros(5 << 18, device=DEVICE)\n    raise ValueError('x')\nf()")
        self.assertEqual(failed, "ValueError")
        found = [one for one in self.holders() if one["kind"] == "exception"]
        self.assertEqual([one["bytes"] for one in found], [5 << 20])
        self.run_ok(found[0]["release"])
        self.assertEqual(self.holders(), [])

    def test_output_cache_is_found_and_released(self):
        self.begin()
        self.kernel.run("torch.zeros(5 << 18, device=DEVICE)")
        found = self.holders()
        self.assertEqual([(one["kind"], one["bytes"]) for one in found], [("output cache", 5 << 20)])
        self.run_ok(found[0]["release"])
        self.assertEqual(self.holders(), [])

    def test_task_is_found_and_released(self):
        self.begin()
        self.run_ok("import asyncio\nasync def w():\n    t = torch.zeros(2 << 18, device=DEVICE)\n    await asyncio.sleep(1000)\nasyncio.create_task(w()); None")
        self.run_ok("await asyncio.sleep(0.1)")
        self.kernel.run("del w")
        found = self.holders()
        self.assertEqual([(one["kind"], one["bytes"]) for one in found], [("coroutine", 2 << 20)])
        self.run_ok(found[0]["release"] + "\nawait asyncio.sleep(0.1)")
        self.assertEqual(self.holders(), [])

    def test_held_is_said_and_kept_is_kept(self):
        self.begin()
        self.run_ok(planted.PRELUDE + planted._in_module("CACHE = [T(2)]"))
        text = self.run_ok("%tare zero")
        self.assertIn("HELD: 2.0 MiB: 1 thing holds memory", text)
        self.assertIn("planted_mod.CACHE.clear()", text)
        self.run_ok("import planted_mod; planted_mod.CACHE.clear()")
        self.begin()
        self.run_ok("keep_me = torch.zeros(3 << 18, device=DEVICE); gone = torch.zeros(3 << 18, device=DEVICE)")
        text = self.run_ok("%tare zero --keep keep_*")
        self.assertIn("kept as asked: keep_me 3.0 MiB", text)
        self.assertIn("ZERO:", text)
        self.assertEqual(self.kernel.value("['keep_me' in globals(), 'gone' in globals()]"), [True, False])

    def test_dry_run_changes_nothing(self):
        self.begin()
        self.run_ok("x = torch.zeros(3 << 18, device=DEVICE)")
        text = self.run_ok("%tare zero --dry-run")
        self.assertRegex(text, r"x\s+3.0 MiB")
        self.assertIn("nothing was changed", text)
        self.assertEqual(self.kernel.value("'x' in globals()"), True)

    def test_setup_cells_and_words_that_are_wrong(self):
        self.run_ok("%%tare setup\nimport math\nready = math.pi")
        self.assertEqual(self.kernel.value("__import__('tare_notebook')._magics.SETUP"), ["import math\nready = math.pi\n"])
        self.assertIn("restart the kernel by hand", self.run_ok("%tare zero --hard"))
        self.assertIn("invalid choice: 'zeor'", self.run_ok("%tare zeor"))
        self.assertIn("unrecognized arguments: --kep", self.run_ok("%tare zero --kep x"))
        self.assertIn("the only cell of this kind", self.run_ok("%%tare nonsense\n1"))

    def test_experiments(self):
        self.begin()
        text = self.run_ok("%%experiment kept\nx = torch.zeros(4 << 18, device=DEVICE)")
        self.assertIn("held: x (4.0 MiB)", text)
        text, _ = self.kernel.run("%%experiment --zero failed\ny = torch.zeros(4 << 18, device=DEVICE)\n1 / 0")
        self.assertIn("ZeroDivisionError", text)
        self.assertIn("released", text)
        with open(os.path.join(self.folder, "log.jsonl"), encoding="utf-8") as file:
            records = [json.loads(line) for line in file]
        self.assertEqual([one["name"] for one in records], ["kept", "failed"])
        self.assertEqual([one["released"] for one in records], [False, True])
        if not REAL:
            self.assertEqual(records[0]["gpu"]["end"] - records[0]["gpu"]["start"], 4 << 20)

    def test_broken_import_of_torch(self):
        self.begin()
        self.addCleanup(self.kernel.run, "sys.modules.update(saved)")
        self.assertIn("torch", self.run_ok("import sys; saved = {k: sys.modules.pop(k) for k in list(sys.modules) if k == 'torch'}; sys.modules['torch'] = type(sys)('torch'); list(saved)"))
        self.assertIn("only partly imported", self.run_ok("%tare mem"))
        self.assertIn("only partly imported", self.run_ok("%tare snapshot x"))


if __name__ == "__main__":
    unittest.main()
