"""Every planted holder is named with its root and bytes, and the line that is shown lets it go."""

from __future__ import annotations

import builtins
import gc
import os
import sys
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(HERE), HERE]
if os.environ.get("TARE_TEST_TORCH", "standin") == "standin":
    sys.path.insert(0, os.path.join(HERE, "standin"))

import torch  # noqa: E402

import planted  # noqa: E402
import tare_notebook  # noqa: E402

STANDIN = "standin" in torch.__version__
DEVICE = "cuda" if STANDIN else "cpu"


class Planted(unittest.TestCase):
    def setUp(self):
        # Names of a notebook, with nothing else in them.
        self.space = {"__name__": "__main__", "__builtins__": builtins, "torch": torch, "DEVICE": DEVICE}
        exec(planted.PRELUDE, self.space)
        gc.collect()

    def holders(self):
        # What torch keeps for cuBLAS stays after the first product.
        return [one for one in tare_notebook.holders(namespace=self.space) if one.kind != "library"]

    def check(self, case):
        self.assertEqual(self.holders(), [], "something was left by the case before")
        exec(compile(case.source, f"<{case.name}>", "exec"), self.space)
        found = self.holders()
        mine = [holder for holder in found if holder.kind == case.kind]
        self.assertEqual(len(mine), 1, f"one holder of kind {case.kind!r}:\n{found}")
        holder = mine[0]
        self.assertTrue(holder.where.startswith(case.where), f"{holder.where!r} is not {case.where!r}")
        extra = 0
        if case.kind == "DataLoader workers":
            self.assertGreaterEqual(holder.nbytes, case.mib * planted.MIB)
        else:
            extra = abs(holder.nbytes - case.mib * planted.MIB)
            self.assertLess(extra, 64 * 1024, f"{holder.nbytes} bytes are not {case.mib} MiB\n{found}")
        if case.kind == "C++":
            self.assertIsNone(holder.release)
        else:
            self.assertIsNotNone(holder.release, f"no line\n{found}")
            exec(compile(holder.release, "<release>", "exec"), self.space)
        if case.after:
            exec(case.after, self.space)
        left = [one for one in self.holders() if one.kind == case.kind]
        self.assertEqual(left, [], f"after `{holder.release}`")

    def tearDown(self):
        self.space.clear()
        sys.modules.pop("planted_mod", None)
        sys.modules.pop("wandb", None)
        for name in ("last_value", "last_traceback", "last_type", "last_exc"):
            if hasattr(sys, name):
                delattr(sys, name)
        gc.collect()


def _add(case):
    def test(self):
        if case.only == "standin" and not STANDIN:
            self.skipTest("only with the stand-in")
        self.check(case)

    setattr(Planted, "test_" + "".join(c if c.isalnum() else "_" for c in case.name), test)


for _case in planted.PLANTED:
    _add(_case)


if __name__ == "__main__":
    unittest.main()
