"""Memory, zero, baselines, experiments, the restart and the binary: without IPython, on the stand-in for torch."""

from __future__ import annotations

import gc
import http.server
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import types
import unittest
import unittest.mock as mock
import weakref
import xml.dom.minidom

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path[:0] = [os.path.dirname(HERE), HERE, os.path.join(HERE, "standin")]

import torch  # noqa: E402

import tare_notebook  # noqa: E402
from tare_notebook import _driver, _experiment, _holders, _restart, _tables, _torch, _zero  # noqa: E402

MIB = 1 << 20


def tensor(mib):
    return torch.zeros(mib * 262144, device="cuda")


class Case(unittest.TestCase):
    def setUp(self):
        self.folder = tempfile.mkdtemp(prefix="tare-notebook-")
        self.addCleanup(shutil.rmtree, self.folder, ignore_errors=True)
        # Other suites of this process leave nothing, or this one would count it.
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        self.assertEqual(torch.cuda.memory_allocated(), 0)


class Zero(Case):
    def test_names_go_and_kept_ones_stay(self):
        space = {"a": tensor(3), "b": tensor(5), "data1": tensor(1), "torch": torch}
        done = tare_notebook.zero(keep=["b", "data*", "missing"], namespace=space)
        self.assertEqual(done.verdict, "ZERO")
        self.assertTrue(done)
        self.assertEqual(sorted(space), ["b", "data1"])
        self.assertEqual((done.before.allocated, done.after.allocated), (9 * MIB, 6 * MIB))
        self.assertEqual(done.modules, 1)
        text = str(done)
        self.assertIn("kept as asked: b 5.0 MiB, data1 1.0 MiB", text)
        self.assertIn("no such name to keep: missing", text)
        self.assertRegex(text, r"GPU 0 allocated\s+9.0 MiB\s+6.0 MiB\s+-3.0 MiB")
        self.assertIn("ZERO: no tensor is left but what was to be kept", text)

    def test_dry_run_says_and_changes_nothing(self):
        space = {"a": tensor(3)}
        done = tare_notebook.zero(dry_run=True, namespace=space)
        self.assertEqual((done.verdict, done.named, list(space)), ("DRY RUN", [("a", 3 * MIB)], ["a"]))
        self.assertEqual(torch.cuda.memory_allocated(), 3 * MIB)
        self.assertRegex(str(done), r"a\s+3.0 MiB")

    def test_what_is_held_is_named(self):
        module = type(sys)("held_mod")
        module.cache = [tensor(2)]
        sys.modules["held_mod"] = module
        self.addCleanup(sys.modules.pop, "held_mod", None)
        done = tare_notebook.zero(namespace={})
        self.assertEqual(done.verdict, "HELD")
        self.assertFalse(done)
        self.assertEqual([(one.where, one.nbytes, one.release) for one in done.held], [("held_mod.cache", 2 * MIB, "import held_mod; held_mod.cache.clear()")])
        self.assertIn("HELD: 2.0 MiB: 1 thing holds memory", str(done))
        self.assertEqual(json.loads(json.dumps(done.as_dict()))["holders"][0]["bytes"], 2 * MIB)

    def test_caches_of_torch_are_emptied(self):
        plans = torch.backends.cuda.cufft_plan_cache
        model = torch.nn.Linear(8, 8, device="cuda")
        model(torch.zeros(4, 8, device="cuda"))
        torch._autocast.append(tensor(1))
        plans.append("plan")
        collected = torch.cuda._state["collected"]
        self.assertGreater(torch.cuda.memory_allocated(), 8 * MIB)
        done = tare_notebook.zero(namespace={"model": model})
        del model
        done = tare_notebook.zero(namespace={})
        self.assertEqual((torch.cuda.memory_allocated(), torch.cuda.memory_reserved()), (0, 0))
        self.assertEqual((list(plans), torch._autocast), ([], []))
        self.assertGreater(torch.cuda._state["collected"], collected)
        self.assertEqual({what for what, result in done.caches if result == "cleared"}, {"autocast cache", "cuBLAS workspaces", "cuFFT plans", "cached segments", "IPC handles"})

    def test_workspaces_that_cannot_be_freed_are_the_librarys(self):
        torch.matmul(torch.zeros(4, 8, device="cuda"), torch.zeros(8, 4, device="cuda"))
        clear = torch._C._cuda_clearCublasWorkspaces
        del torch._C._cuda_clearCublasWorkspaces
        try:
            done = tare_notebook.zero(namespace={})
        finally:
            torch._C._cuda_clearCublasWorkspaces = clear
        self.assertEqual(done.verdict, "ZERO")
        self.assertIn("libraries keep: cuBLAS workspaces (by their size) 8.1 MiB", str(done))

    def test_a_cache_that_fails_keeps_no_other_from_being_emptied(self):
        with mock.patch.object(torch, "clear_autocast_cache", side_effect=RuntimeError("no")):
            done = tare_notebook.zero(namespace={"a": tensor(1)})
        self.assertIn(("autocast cache", "RuntimeError: no"), done.caches)
        self.assertIn("could not clear autocast cache: RuntimeError: no", str(done))
        self.assertEqual(torch.cuda.memory_reserved(), 0)

    def test_dynamo_is_reset_only_where_it_is_loaded(self):
        self.assertNotIn("dynamo cache", dict(_torch.clear_caches(torch)))
        dynamo = type(sys)("torch._dynamo")
        dynamo.reset = mock.Mock()
        with mock.patch.dict(sys.modules, {"torch._dynamo": dynamo}):
            self.assertIn(("dynamo cache", "cleared"), _torch.clear_caches(torch))
        dynamo.reset.assert_called_once()

    def test_two_models_that_fit_only_one_after_the_other(self):
        gib = 1024
        first = {"model": tensor(5 * gib)}
        with self.assertRaises(torch.cuda.OutOfMemoryError):
            tensor(5 * gib)
        self.assertTrue(tare_notebook.zero(namespace=first))
        second = {"model": tensor(5 * gib)}
        self.assertEqual(torch.cuda.memory_allocated(), 5 << 30)
        self.assertTrue(tare_notebook.zero(namespace=second))

    def test_names_of_a_script_are_not_touched(self):
        mine = tensor(1)
        done = tare_notebook.zero()
        self.assertEqual(done.names, [])
        self.assertEqual(mine.numel(), 262144)
        self.assertEqual(done.verdict, "HELD")
        self.assertIn("local `mine`", done.held[0].where)


class Memory(Case):
    def test_one_table(self):
        space = {"model": torch.nn.Sequential(torch.nn.Linear(512, 1024, device="cuda")), "x": tensor(4)}
        gone = torch.zeros(100, device="cuda")
        del gone
        others = [_driver.GpuProcess(4711, 3 << 30, 0, "python"), _driver.GpuProcess(os.getpid(), 1 << 30, 0, "me")]
        with mock.patch.object(_driver, "gpu_processes", return_value=others):
            found = tare_notebook.mem(namespace=space)
        text = str(found)
        self.assertRegex(text, r"allocated by tensors\s+6.0 MiB")
        self.assertRegex(text, r"reserved but idle\s+\d")
        self.assertRegex(text, r"process 4711 \(python\)\s+3.0 GiB")
        self.assertNotIn(str(os.getpid()), text)
        self.assertIn("x (1048576,) float32 cuda:0", text)
        self.assertIn("model[0].weight (512, 1024) float32 cuda:0", text)
        self.assertIn("<table", found._repr_html_())
        self.assertEqual(json.loads(json.dumps(found.as_dict()))["allocated"], 6 * MIB)

    def test_names_are_escaped_in_html(self):
        found = tare_notebook.mem(namespace={"d": {"<b>": tensor(1)}})
        self.assertIn("&lt;b&gt;", found._repr_html_())
        self.assertNotIn("<b>", found._repr_html_())

    def test_sizes(self):
        for text, value in (("4096", 4096), ("1.5 GiB", 3 << 29), ("2MB", 2_000_000), ("512KiB", 1 << 19), ("1m", 1 << 20)):
            self.assertEqual(_tables.parse_size(text), value)
        for text in ("", "MiB", "-1", "1 TiBs", "nan", "inf"):
            self.assertRaises(ValueError, _tables.parse_size, text)
        self.assertEqual([_tables.size(value) for value in (0, 1023, 1536, -MIB, None)], ["0 B", "1023 B", "1.5 KiB", "-1.0 MiB", "–"])


class Assert(Case):
    def test_nothing_held_passes_and_something_held_does_not(self):
        tare_notebook.assert_zero()
        box = [tensor(2)]
        with self.assertRaises(tare_notebook.StillHeld) as caught:
            tare_notebook.assert_zero()
        self.assertIn("2.0 MiB held", str(caught.exception))
        self.assertIn("local `box`", str(caught.exception))
        box.clear()
        tare_notebook.assert_zero()

    def test_what_was_there_before_is_not_held_against_anyone(self):
        old = tensor(2)
        baseline = tare_notebook.Baseline()
        tare_notebook.assert_zero(baseline)
        new = tensor(3)
        with self.assertRaises(tare_notebook.StillHeld) as caught:
            tare_notebook.assert_zero(baseline)
        self.assertEqual([one.nbytes for one in caught.exception.holders], [3 * MIB])
        del new
        tare_notebook.assert_zero(baseline)
        torch._C._hold(4 * MIB)
        self.addCleanup(torch._C._release_held)
        with self.assertRaises(tare_notebook.StillHeld) as caught:
            tare_notebook.assert_zero(baseline)
        self.assertEqual([(one.kind, one.nbytes) for one in caught.exception.holders], [("C++", 4 * MIB)])
        self.assertEqual(old.numel(), 2 * 262144)


class Experiments(Case):
    def setUp(self):
        super().setUp()
        self.log = os.path.join(self.folder, "log.jsonl")

    def test_a_line_each(self):
        box = []
        with tare_notebook.experiment("first", path=self.log) as first:
            big = tensor(30)
            del big
        with tare_notebook.experiment("second", path=self.log) as second:
            box.append(tensor(4))
        with self.assertRaises(ZeroDivisionError), tare_notebook.experiment("third", path=self.log):
            1 / 0
        records = _experiment.read(self.log)
        self.assertEqual([one["name"] for one in records], ["first", "second", "third"])
        self.assertEqual([one["outcome"] for one in records], ["finished", "finished", "ZeroDivisionError"])
        self.assertEqual([one["released"] for one in records], [True, False, True])
        self.assertEqual((records[0]["gpu"]["start"], records[0]["gpu"]["peak"], records[0]["gpu"]["end"]), (0, 30 * MIB, 0))
        self.assertEqual(records[1]["gpu"]["end"], 4 * MIB)
        self.assertEqual(records[1]["held"][0]["bytes"], 4 * MIB)
        self.assertEqual(records[0]["versions"]["torch"], torch.__version__)
        self.assertGreater(records[0]["host"]["peak"], 0)
        self.assertEqual((first.record, second.record), tuple(records[:2]))
        report = tare_notebook.report(self.log)
        self.assertRegex(str(report), r"first\s+GPU\s+0 B\s+30.0 MiB\s+0 B\s+released")
        self.assertIn("ZeroDivisionError; released", str(report))
        page = report._repr_html_()
        self.assertIn("<svg", page)
        xml.dom.minidom.parseString(report.svg())

    def test_the_lock_is_that_of_the_environment(self):
        self.assertEqual(_experiment.environment_facts(), (None, None))
        os.makedirs(os.path.join(self.folder, "conda-meta", "tare"))
        with open(os.path.join(self.folder, "conda-meta", "tare", "environment.json"), "w", encoding="utf-8") as file:
            json.dump({"environment_digest": "ab", "metadata": {"lock": {"sha256": "cd"}}}, file)
        with mock.patch.object(sys, "prefix", self.folder), tare_notebook.experiment("x", path=self.log) as done:
            pass
        self.assertEqual((done.record["lock"], done.record["environment"]), ("cd", "ab"))

    def test_the_outer_of_two_knows_the_peak_of_the_inner(self):
        with tare_notebook.experiment("outer", path=self.log) as outer:
            with tare_notebook.experiment("inner", path=self.log) as inner:
                big = tensor(50)
                del big
        self.assertEqual(inner.record["gpu"]["peak"], 50 * MIB)
        self.assertEqual(outer.record["gpu"]["peak"], 50 * MIB)

    def test_lines_that_are_no_records_are_left_out(self):
        with open(self.log, "w", encoding="utf-8") as file:
            file.write('nonsense\n[]\n{"name": 3}\n{"name": "<x>", "gpu": {"peak": 5}}\n')
        report = tare_notebook.report(self.log)
        self.assertEqual(len(report.records), 1)
        self.assertIn("&lt;x&gt;", report._repr_html_())
        xml.dom.minidom.parseString(report.svg())
        self.assertEqual(str(tare_notebook.report(self.log + ".none")), "no experiments yet")

    def test_a_log_that_cannot_be_written_is_said(self):
        with mock.patch("sys.stderr") as stderr, tare_notebook.experiment("x", path=os.path.join(self.folder, "no", "log")):
            pass
        self.assertIn("was not written down", "".join(str(call) for call in stderr.write.mock_calls))


class Binary(Case):
    def fake(self, body):
        path = os.path.join(self.folder, "tare")
        with open(path, "w", encoding="utf-8") as file:
            file.write("#!/bin/sh\n" + body)
        os.chmod(path, 0o755)
        return path

    def test_the_snapshot_goes_to_the_program(self):
        path = self.fake('echo "$@"; test -s "$3" && echo there\n')
        keep = tensor(1)
        with mock.patch.dict(os.environ, {"TARE_BINARY": path}):
            answer = tare_notebook.whatif("--conf", "expandable_segments:True")
            self.assertEqual(answer.code, 0)
            self.assertRegex(str(answer), r"^gpu whatif /\S+\.pickle --conf expandable_segments:True\nthere$")
            self.assertFalse(os.path.exists(str(answer).split()[2]))
        target = tare_notebook.snapshot(os.path.join(self.folder, "s.pickle"))
        import pickle

        with open(target, "rb") as file:
            self.assertEqual(len(pickle.load(file)["segments"]), 1)
        del keep

    def test_a_program_that_is_gone_is_named(self):
        gone = os.path.join(self.folder, "gone")
        with mock.patch.dict(os.environ, {"TARE_BINARY": gone, "PATH": self.folder}):
            with self.assertRaises(tare_notebook.TareNotFound) as caught:
                tare_notebook.binary()
        self.assertIn(f"`{gone}` is not there any more", str(caught.exception))

    def test_without_cuda_there_is_nothing_to_write(self):
        with mock.patch.dict(torch.cuda._state, {"initialized": False}):
            self.assertRaisesRegex(RuntimeError, "has not used CUDA", tare_notebook.snapshot, "x")


class Processes(Case):
    def test_children_on_the_gpu_are_named_and_ended_by_the_line(self):
        child = subprocess.Popen([sys.executable, "-c", "import sys; sys.stdin.read()"], stdin=subprocess.PIPE)
        self.addCleanup(child.stdin.close)
        self.addCleanup(child.kill)
        listed = [_driver.GpuProcess(child.pid, 7 * MIB, 0, "python"), _driver.GpuProcess(1, MIB, 0, "init")]
        with mock.patch.object(_driver, "gpu_processes", return_value=listed):
            found = tare_notebook.holders(namespace={})
        self.assertEqual([(one.kind, one.nbytes) for one in found], [("child process", 7 * MIB)])
        exec(found[0].release, {})
        self.assertEqual(child.wait(10), -15)

    def test_nvml_is_optional(self):
        self.assertIn(type(_driver.gpu_processes()), (list, type(None)))


class Restart(Case):
    def test_the_server_is_asked_and_the_cells_are_kept(self):
        asked = []

        class Server(http.server.BaseHTTPRequestHandler):
            def answer(self, body):
                asked.append((self.command, self.path, self.headers.get("Authorization")))
                data = json.dumps(body).encode()
                self.send_response(200)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_GET(self):
                self.answer({"id": "abc-1"} if self.path.endswith("/abc-1") else {})

            def do_POST(self):
                self.answer({"id": "abc-1"})

            def log_message(self, *_):
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server)
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        url = f"http://127.0.0.1:{server.server_address[1]}/base/"
        with open(os.path.join(self.folder, "jpserver-1.json"), "w", encoding="utf-8") as file:
            json.dump({"url": url, "token": "secret"}, file)
        connection = os.path.join(self.folder, "kernel-abc-1.json")
        with mock.patch.dict(os.environ, {"XDG_RUNTIME_DIR": self.folder, "JUPYTER_RUNTIME_DIR": self.folder}), mock.patch.object(
            _restart, "connection_file", return_value=connection
        ), mock.patch.object(_restart.subprocess, "Popen") as started:
            done, message = _restart.restart(["import torch"])
            self.assertTrue(done, message)
            self.assertIn("1 setup cell runs again", message)
            arguments = started.call_args[0][0]
            self.assertEqual(arguments[3:], [url.rstrip("/"), "abc-1", connection, "setup"])
            # The token goes by the environment: arguments are for everyone to see.
            self.assertNotIn("secret", " ".join(arguments))
            self.assertEqual(started.call_args[1]["env"]["TARE_RESTART_TOKEN"], "secret")
            with mock.patch.dict(os.environ, {"TARE_RESTART_TOKEN": "secret"}):
                self.assertEqual(_restart._main([url.rstrip("/"), "abc-1", connection, "bare"]), 0)
            self.assertEqual(_restart.take(connection), ["import torch"])
            self.assertEqual(_restart.take(connection), [])
        self.assertEqual(asked[-1], ("POST", "/base/api/kernels/abc-1/restart", "token secret"))
        with mock.patch.object(_restart, "connection_file", return_value=connection), mock.patch.object(_restart, "servers", return_value=[]):
            done, message = _restart.restart([])
        self.assertFalse(done)
        self.assertIn("restart the kernel by hand", message)


class Elsewhere(Case):
    def python(self, code, **env):
        path = os.pathsep.join(sys.path[:3])
        done = subprocess.run([sys.executable, "-c", code], env=dict(os.environ, PYTHONPATH=path, **env), stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        return done.returncode, done.stdout.decode(), done.stderr.decode()

    def test_torch_and_ipython_are_never_imported(self):
        code, out, err = self.python("import sys, tare_notebook; tare_notebook.mem(); tare_notebook.zero(); tare_notebook.holders(); print([m for m in sys.modules if m.split('.')[0] in ('torch', 'IPython')])")
        self.assertEqual((code, out), (0, "[]\n"), err)

    def test_cuda_is_never_started(self):
        code, out, err = self.python("import torch, tare_notebook as t; x = torch.zeros(1 << 20); t.mem(); t.zero(); t.holders(); t.Baseline(); print(torch.cuda.is_initialized())")
        self.assertEqual((code, out), (0, "False\n"), err)

    def test_without_torch_everything_answers(self):
        code, out, err = self.python("import tare_notebook as t; print(t.mem()); print(t.zero()); t.assert_zero(); print(t.holders())")
        self.assertEqual(code, 0, err)
        self.assertIn("torch is not imported", out)
        self.assertIn("ZERO: no tensor is left", out)

    def test_a_broken_torch_is_said(self):
        broken = os.path.join(self.folder, "torch")
        os.mkdir(broken)
        with open(os.path.join(broken, "__init__.py"), "w", encoding="utf-8") as file:
            file.write("import sys\nsys.modules['torch._part'] = sys\nraise OSError('libcudart.so.12: cannot open shared object file')\n")
        code = "import sys; sys.path.insert(0, %r)\ntry:\n    import torch\nexcept OSError:\n    pass\nimport tare_notebook as t; print(t.mem()); print(t.holders())" % self.folder
        code, out, err = self.python(code)
        self.assertEqual(code, 0, err)
        self.assertEqual(out.count("only partly imported"), 2, out)

    def test_the_pytest_fixture(self):
        try:
            import pytest  # noqa: F401
        except ImportError:
            self.skipTest("pytest is not installed")
        with open(os.path.join(self.folder, "test_x.py"), "w", encoding="utf-8") as file:
            file.write("import torch\nkept = []\ndef test_good(tare_zero):\n    torch.zeros(1 << 20, device='cuda')\n\ndef test_bad(tare_zero):\n    kept.append(torch.zeros(1 << 20, device='cuda'))\n\ndef test_after(tare_zero):\n    pass\n")
        path = os.pathsep.join(sys.path[:3])
        command = [sys.executable, "-m", "pytest", "-q", "-p", "tare_notebook.pytest_plugin", "-p", "no:cacheprovider", self.folder]
        done = subprocess.run(command, env=dict(os.environ, PYTHONPATH=path), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        out = done.stdout.decode()
        self.assertIn("3 passed, 1 error", out)
        self.assertIn("test_x.kept.clear()", out)


class Views(Case):
    def test_the_view_is_what_holds_and_not_native_code(self):
        space = {"view": tensor(3).view(3, -1)}
        found = tare_notebook.holders(namespace=space)
        self.assertEqual([(one.kind, one.where, one.release, one.nbytes) for one in found], [("module global", "view", "del view", 3 * MIB)])
        self.assertTrue(tare_notebook.zero(namespace=space))


class Hostile(Case):
    """What lies in a namespace beside the tensors answers with anything, and the holder is named all the same."""

    def look(self, space, *more):
        space["held"] = [tensor(3)]
        # Collected elsewhere, they would say so on their own.
        found = str(tare_notebook.holders(namespace=space))
        self.assertIn("del held", found)
        table = str(tare_notebook.mem(namespace=space))
        self.assertIn("3.0 MiB", table)
        done = tare_notebook.zero(namespace=space)
        self.assertEqual(done.verdict, "ZERO", str(done))
        self.assertEqual(torch.cuda.memory_allocated(), 0)

    def test_a_dead_proxy(self):
        class Thing:
            pass

        thing = Thing()
        space = {"proxy": weakref.proxy(thing), "inside": [weakref.proxy(thing)]}
        del thing
        self.look(space)

    def test_names_that_are_no_names(self):
        class Text(str):
            def __repr__(self):
                raise RuntimeError("no text")

        self.look({5: 1, None: 2, ("a", 1): 3, "d": {Text("x"): tensor(1), 7: {Text("y"): 1}}, Text("own"): [1]})

    def test_classes_that_lie_or_raise(self):
        class Liar:
            @property
            def __class__(self):
                return torch.Tensor

        class Raiser:
            @property
            def __class__(self):
                raise RuntimeError("no class")

        class Meta(type):
            def __getattribute__(cls, name):
                raise RuntimeError(name)

        class Odd(metaclass=Meta):
            pass

        class Numbered:
            __module__ = 5

        class Silent:
            def __getattribute__(self, name):
                raise SystemExit(name)

        self.look({"a": Liar(), "b": Raiser(), "c": Odd(), "d": Numbered(), "e": [Liar(), Raiser(), Odd(), Numbered()], "f": Silent(), "kinds": [Odd, Numbered]})

    def test_containers_that_raise(self):
        class Dict(dict):
            def items(self):
                raise RuntimeError("items")

            values = keys = __iter__ = __len__ = __contains__ = __getitem__ = items

        class List(list):
            def __iter__(self):
                raise RuntimeError("iter")

            __len__ = __getitem__ = __contains__ = __iter__

        class Equal:
            def __eq__(self, other):
                raise RuntimeError("eq")

            def __bool__(self):
                raise RuntimeError("bool")

            def __hash__(self):
                return 7

        kept = Dict()
        dict.__setitem__(kept, "x", tensor(1))
        row = List([tensor(1)])
        space = {"kept": kept, "row": row, "equal": Equal(), "keys": {Equal(): tensor(1)}}
        del kept, row
        self.look(space)

    def test_modules_that_raise(self):
        module = types.ModuleType("hostile_module")

        def missing(name):
            raise RuntimeError(name)

        module.__getattr__ = missing
        module.kept = [1]
        sys.modules["hostile_module"] = module
        self.addCleanup(sys.modules.pop, "hostile_module", None)
        self.look({"module": module})

    def test_tensors_that_raise(self):
        class Exits(torch.Tensor):
            @property
            def device(self):
                raise SystemExit("device")

        self.look({"exits": Exits((4,)), "list": [Exits((4,))]})

    def test_a_snapshot_of_another_layout(self):
        for layout in (None, 5, "text", [5], [{"blocks": 5}], [{"address": "x", "blocks": [{"size": None}]}], {"segments": None}, [{"segment_pool_id": 5}]):
            with mock.patch.object(torch.cuda.memory, "_snapshot", lambda *rest, layout=layout: layout), mock.patch.object(
                torch.cuda, "memory_snapshot", lambda *rest, layout=layout: layout, create=True
            ):
                self.assertEqual(_torch.graph_pool_bytes(torch), 0)
                self.assertEqual(_torch.active_blocks(torch), [])
                self.look({})


class Big(Case):
    def test_a_large_heap_is_bounded(self):
        gc.disable()
        try:
            space = {"data": [{"a": i, "b": [i]} for i in range(150_000)], "deep": [{"x": [tensor(1)]} for _ in range(300)]}
        finally:
            gc.enable()
        with mock.patch.object(_holders._search, "DOWN", 0):
            found = tare_notebook.holders(namespace=space)
        self.assertEqual([(one.where, one.nbytes) for one in found], [("deep", 300 * MIB)])

    def test_out_of_time_is_said(self):
        module = type(sys)("slow_mod")
        module.a = {"b": [[tensor(1)]]}
        sys.modules["slow_mod"] = module
        self.addCleanup(sys.modules.pop, "slow_mod", None)
        found = _holders.find({}, budget=0.0)
        self.assertEqual([one.kind for one in found], ["unknown"])
        self.assertIn("the time for the search was used up", found.remarks)
        del module.a


if __name__ == "__main__":
    unittest.main()
