"""--nccl: which files are refused, and that the worker begins anew with the file in force."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_profiler.config import ScriptConfig, StudyConfig
from ddp_profiler.errors import UsageError
from ddp_profiler.measure import environment, nccl
from ddp_profiler.measure.nccl import Library, TorchBuild, check_fits, examine, provider

ROOT = Path(__file__).parents[2]
CUDA_12 = TorchBuild("2.11.0+cu128", "12.8", Path("/venv/torch"))


def compile_library(target, code, *options):
    source = target.with_suffix(".c")
    source.write_text(code)
    command = ["cc", "-shared", "-fPIC", "-o", str(target), str(source), *map(str, options)]
    subprocess.run(command, check=True, capture_output=True)
    return target


def fake_nccl(folder, number=23203, stated="NCCL version 2.32.3+cuda12.9", code=0):
    """A library that says its version and holds the text that NCCL writes into its log."""
    folder.mkdir(parents=True, exist_ok=True)
    return compile_library(
        folder / "libnccl.so.2",
        f'const char stated[] = "{stated}";\n'
        f"int ncclGetVersion(int *v) {{ *v = {number}; return {code}; }}\n",
        "-Wl,-soname,libnccl.so.2",
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    return tmp_path_factory.mktemp("nccl")


@pytest.fixture(scope="module")
def library(folder):
    return fake_nccl(folder / "newer")


def test_a_file_says_its_version_and_cuda(library):
    assert examine(library) == Library(str(library.resolve()), "2.32.3", "12.9")


def test_a_link_is_resolved(library, tmp_path):
    (tmp_path / "libnccl.so").symlink_to(library)
    assert examine(tmp_path / "libnccl.so").path == str(library.resolve())


def test_a_build_that_does_not_say_its_cuda(folder):
    assert examine(fake_nccl(folder / "silent", stated="")).cuda is None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda at: at / "nowhere", "there is no such file"),
        (lambda at: at, "that is a folder"),
        (lambda at: _text(at), "is no NCCL that can be loaded"),
        (lambda at: compile_library(at / "other.so", "int one;"), "ncclGetVersion"),
        (lambda at: fake_nccl(at / "broken", code=5), "ncclGetVersion failed"),
        (
            lambda at: compile_library(
                at / "crash.so", "void abort(void); int ncclGetVersion(int *v) { abort(); }"
            ),
            "ended a process by signal 6",
        ),
    ],
    ids=["missing", "folder", "text", "another library", "error", "crash"],
)
def test_what_is_no_nccl_is_refused_in_one_line(folder, make, words):
    with pytest.raises(UsageError) as raised:
        examine(make(folder))
    assert words in raised.value.message
    assert raised.value.message.startswith("--nccl ")
    assert "\n" not in raised.value.message
    assert raised.value.remedy


def _text(folder):
    (folder / "text.so").write_text("no library")
    return folder / "text.so"


@pytest.mark.parametrize(
    ("library_cuda", "torch_cuda", "words"),
    [
        ("12.9", "12.8", None),
        ("12.9", "12.4", None),
        (None, "13.0", None),
        ("12.9", "13.0", "for CUDA 12.9, but torch 2.11.0 is built for CUDA 13.0"),
        ("13.4", "12.8", "for CUDA 13.4, but torch 2.11.0 is built for CUDA 12.8"),
        ("12.9", None, "needs a torch with CUDA; 2.11.0 was built without"),
    ],
)
def test_cuda_versions_must_fit(library_cuda, torch_cuda, words):
    found = Library("/x/libnccl.so.2", "2.32.3", library_cuda)
    torch = TorchBuild("2.11.0", torch_cuda, Path("/t"))
    if words is None:
        check_fits(found, torch)
        return
    with pytest.raises(UsageError, match=words) as raised:
        check_fits(found, torch)
    if torch_cuda is not None:
        assert f"nvidia-nccl-cu{torch_cuda[:2]}." in raised.value.remedy


def test_torch_is_read_without_being_imported():
    code = (
        "import sys; from ddp_profiler.measure.nccl import read_torch_build; "
        "print(read_torch_build().version, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    import torch

    assert done.stdout.split() == [torch.__version__, "False"]


class Started(Exception):
    """The process would be another program from here on."""


@pytest.fixture
def start(monkeypatch):
    """Calls ``use``; returns what would be started."""
    monkeypatch.delenv(nccl.PRELOAD, raising=False)
    monkeypatch.delenv(nccl.STARTED_WITH, raising=False)

    def run(path, build=CUDA_12):
        calls = []

        def execve(*words):
            calls.append(words)
            raise Started

        with pytest.raises(Started):
            nccl.use(path, torch_build=lambda: build, execve=execve)
        return calls[0]

    return run


def test_the_process_starts_anew_with_the_same_arguments_and_environment(
    library, start, monkeypatch
):
    monkeypatch.setenv("MASTER_PORT", "29517")
    monkeypatch.setenv(nccl.PRELOAD, f"/x/libjemalloc.so {library.resolve()}")
    program, arguments, environ = start(library)
    assert program == sys.executable
    assert arguments == sys.orig_argv
    assert environ[nccl.PRELOAD] == f"{library.resolve()}:/x/libjemalloc.so"
    added = {nccl.STARTED_WITH: str(library.resolve()), nccl.PRELOAD: environ[nccl.PRELOAD]}
    assert environ == {**os.environ, **added}


def test_a_mark_of_an_earlier_start_without_the_library_does_not_count(library, start, monkeypatch):
    monkeypatch.setenv(nccl.STARTED_WITH, str(library.resolve()))
    assert str(library.resolve()) in start(library)[2][nccl.PRELOAD]


def test_paths_that_the_loader_would_split_are_refused(folder, monkeypatch):
    odd = fake_nccl(folder / "two words")
    with pytest.raises(UsageError, match="a space or colon"):
        nccl.use(odd, torch_build=lambda: CUDA_12, execve=pytest.fail)


def test_a_cuda_build_is_needed_before_anything_is_loaded(tmp_path):
    build = TorchBuild("2.13.0+cpu", None, tmp_path)
    with pytest.raises(UsageError, match=r"needs a torch with CUDA; 2\.13\.0\+cpu was built"):
        nccl.use(tmp_path / "nowhere", torch_build=lambda: build, execve=pytest.fail)


@pytest.fixture(scope="module")
def torch_like(folder):
    """A library that is linked to an NCCL beside it, as torch's is."""
    own = fake_nccl(folder / "own", 22809, "NCCL version 2.28.9+cuda12.8")
    return compile_library(
        folder / "libtorch_like.so",
        "int ncclGetVersion(int *); int asked(void) { int v; ncclGetVersion(&v); return v; }",
        f"-L{own.parent}",
        "-l:libnccl.so.2",
        f"-Wl,-rpath,{own.parent}",
    )


_PROGRAM = """
import ctypes, json, os, sys
from pathlib import Path
from ddp_profiler.measure import nccl, torch_probe
library, torch_like = sys.argv[1:3]
print(os.getpid(), flush=True)
# Torch is not asked: this machine's has no CUDA.
nccl._check_used = lambda resolved: None
nccl.use(Path(library), torch_build=lambda: nccl.TorchBuild("2.11.0", "12.8", Path("/t")))
asked = ctypes.CDLL(torch_like).asked()
path = nccl.provider(torch_like)
print(json.dumps([sys.argv[3:], asked, path, torch_probe.ask_nccl(path), os.environ["KEPT"]]))
"""


def run_program(*words, **environ):
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM, *map(str, words)],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()


def test_what_is_linked_to_an_nccl_of_its_own_gets_the_given_one(library, torch_like):
    """Process, arguments and environment stay; the library's own path is not taken."""
    first, second, told = run_program(library, torch_like, "--lr", "3e-4 x", KEPT="yes")
    assert first == second
    resolved = str(library.resolve())
    assert json.loads(told) == [["--lr", "3e-4 x"], 23203, resolved, "2.32.3", "yes"]


def test_the_provider_is_what_a_library_is_linked_to(torch_like, folder):
    assert provider(str(torch_like)) == str((folder / "own" / "libnccl.so.2").resolve())


def test_a_library_that_holds_nccl_inside_itself_has_no_other_provider(folder):
    inside = compile_library(folder / "inside.so", "int ncclGetVersion(int *v) { return 0; }")
    hidden = compile_library(folder / "hidden.so", "int nothing;")
    assert provider(str(inside)) is None
    assert provider(str(hidden)) is None
    assert provider(str(folder / "nowhere.so")) is None


@pytest.mark.parametrize(
    ("gpus", "used", "words"),
    [
        (0, None, "sees none here"),
        (1, "/venv/nvidia/nccl/lib/libnccl.so.2", "uses NCCL 2.28.9 of /venv"),
        (1, None, "holds NCCL inside itself"),
    ],
)
def test_a_second_start_without_effect_is_refused(library, monkeypatch, gpus, used, words):
    import torch

    resolved = str(library.resolve())
    monkeypatch.setenv(nccl.STARTED_WITH, resolved)
    monkeypatch.setenv(nccl.PRELOAD, resolved)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(nccl, "in_use", lambda: ("2.28.9" if used else None, used))
    with pytest.raises(UsageError) as raised:
        nccl.use(library, execve=pytest.fail)
    assert words in raised.value.message
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(nccl, "in_use", lambda: ("2.32.3", resolved))
    nccl.use(library, execve=pytest.fail)


def test_a_torch_that_lacks_a_function_of_nccl_is_told_in_one_line(library, monkeypatch):
    resolved = str(library.resolve())
    monkeypatch.setenv(nccl.STARTED_WITH, resolved)
    monkeypatch.setenv(nccl.PRELOAD, resolved)

    class Broken:
        def find_spec(self, name, path=None, target=None):
            if name == "torch":
                raise ImportError("/t/libtorch_cuda.so: undefined symbol: ncclAlltoAll")

    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(UsageError, match="undefined symbol: ncclAlltoAll") as raised:
        nccl.use(library, execve=pytest.fail)
    assert "older" in raised.value.remedy


def test_gloo_uses_no_nccl():
    with pytest.raises(UsageError, match="--backend gloo uses none"):
        StudyConfig(backend="gloo", nccl=Path("x"))
    assert ScriptConfig(script=None, nccl=Path("x")).nccl == Path("x")


def test_the_worker_refuses_before_it_measures(library):
    """Through the worker itself, on this torch."""
    done = subprocess.run(
        [sys.executable, "-m", "ddp_profiler.run", "--nccl", str(library)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    import torch

    if torch.version.cuda is not None:
        pytest.skip("this torch has CUDA")
    assert done.returncode == 2
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 2
    assert "--nccl needs a torch with CUDA" in lines[0]


def test_what_is_in_force_is_recorded(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 28, 9))
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv(nccl.PRELOAD, "/n/libnccl.so.2")
    monkeypatch.setattr(nccl, "in_use", lambda: ("2.32.3", "/n/libnccl.so.2"))
    told = environment.describe(torch.device("cuda"), 1, 1, "nccl")
    assert (told["nccl"], told["nccl_library"]) == ("2.32.3", "/n/libnccl.so.2")
    assert told["variables"]["NCCL_ALGO"] == "Ring"
    assert told["variables"]["LD_PRELOAD"] == "/n/libnccl.so.2"
    # Where torch holds it inside itself, the version that it was compiled with is all there is.
    monkeypatch.setattr(nccl, "in_use", lambda: (None, None))
    told = environment.describe(torch.device("cuda"), 1, 1, "nccl")
    assert (told["nccl"], told["nccl_library"]) == ("2.28.9", None)
