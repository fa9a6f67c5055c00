"""Kernels in C++ for the CPU at hand, compiled on it when they are first wanted, and called through XLA's FFI.

XLA's own CPU code repacks a weight for every product and copies the blocks that attention reads; these read both as
they lie in memory. What is compiled here is for this very CPU (``-march=native``), so it lies in a cache of the machine
and not in a wheel. It needs a compiler (``$CXX``, else c++, g++ or clang++; GCC from 9 on, Clang from 10 on) and the
headers that jaxlib brings. Where there is none, or ``JAXPAGE_NATIVE=0`` is set, the kernels refuse every case and the
portable implementations do the work.

Owns how the library is made, found and called; must not know what any kernel computes. Libraries lie in
``$JAXPAGE_CACHE/native``, else ``~/.cache/jaxpage/native``, named by all that they are made of: sources, headers,
compiler and the CPU's features.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib.metadata
import logging
import os
import shlex
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.ffi
import jax.numpy as jnp
import numpy as np

FOLDER = Path(__file__).parent
TARGETS = ("pallas_kernels_attention", "pallas_kernels_matmul", "pallas_kernels_block_matmul")
"""Functions of the library that XLA calls."""
COMPILERS = ("c++", "g++", "clang++")
TIMEOUT_S = 300

logger = logging.getLogger("pallas_kernels")
_lock = threading.Lock()


def call(target: str, results: Any, *arrays: Any, **attributes: float | int) -> Any:
    """Calls a kernel on arrays; for the CPU, inside or outside of jit. It cannot be differentiated.

    Args:
        target: one of ``TARGETS``.
        results: ``jax.ShapeDtypeStruct`` of the result.
        arrays: as the kernel takes them; an array without elements stands for one left out.
        attributes: passed as float32 or int64.

    Raises:
        NotImplementedError: if there is no library, saying why.
    """
    require()
    typed = {name: np.float32(x) if isinstance(x, float) else np.int64(x) for name, x in attributes.items()}
    return jax.ffi.ffi_call(target, results, vmap_method="sequential")(*arrays, **typed)


def optional(array: Any, dtype: Any = jnp.float32) -> jax.Array:
    """An array as a kernel takes it; for None, what stands for an array that is left out."""
    return jnp.zeros(0, dtype) if array is None else jnp.asarray(array, dtype)


def require() -> None:
    """Compiles and loads the library if that has not been done; raises NotImplementedError if it cannot be had."""
    if os.environ.get("JAXPAGE_NATIVE") == "0":
        raise NotImplementedError("JAXPAGE_NATIVE=0 is set")
    with _lock:
        refusal = _load()
    if refusal:
        raise NotImplementedError(refusal)


@functools.cache
def _load() -> str | None:
    """Makes the kernels known to XLA; why it cannot, if it cannot."""
    try:
        compiler = find_compiler()
        if compiler is None:
            return f"no C++ compiler here ($CXX, {', '.join(COMPILERS)})"
        path = build(compiler, cache_folder())
        try:
            library = ctypes.CDLL(str(path))
        except OSError:  # damaged, as after a loss of power
            path.unlink(missing_ok=True)
            library = ctypes.CDLL(str(build(compiler, cache_folder())))
        functions = [getattr(library, target) for target in TARGETS]
    except Exception as error:  # whatever a compiler, a disk or a loader comes up with: others can do the work
        said = getattr(error, "stderr", None) or str(error)
        said = said.decode(errors="replace") if isinstance(said, bytes) else said
        reason = f"the C++ kernels cannot be compiled or loaded: {said.strip():.500}"
        logger.warning("%s", reason)
        return reason
    for target, function in zip(TARGETS, functions, strict=True):
        jax.ffi.register_ffi_target(target, jax.ffi.pycapsule(function), platform="cpu")
    return None


def find_compiler() -> list[str] | None:
    """The command of a C++ compiler; None if there is none."""
    command = shlex.split(os.environ.get("CXX", ""))
    if command:
        return command if shutil.which(command[0]) else None
    return next(([name] for name in COMPILERS if shutil.which(name)), None)


def cache_folder() -> Path:
    """Where libraries are kept."""
    return Path(os.path.expanduser(os.environ.get("JAXPAGE_CACHE") or "~/.cache/jaxpage")).absolute() / "native"


def build(compiler: Sequence[str], folder: Path) -> Path:
    """The library, compiled unless ``folder`` has it.

    Raises:
        OSError: if the folder cannot be written.
        subprocess.SubprocessError: if the compiler fails or takes longer than ``TIMEOUT_S``.
    """
    flags = ["-std=c++17", "-O3", "-shared", "-fPIC", "-pthread", "-Wno-psabi"]
    # Products and sums may be contracted to one instruction. Nothing else may be reordered: results have to repeat.
    flags += ["-ffp-contract=fast", "-fno-math-errno"]
    machine = os.uname().machine if hasattr(os, "uname") else ""
    flags.append("-march=native" if machine in ("x86_64", "i686") else "-mcpu=native")
    run = functools.partial(subprocess.run, check=True, capture_output=True, text=True, timeout=TIMEOUT_S)
    # What a compiler defines by itself tells its version and every feature of the CPU that it is going to use.
    defined = run([*compiler, *flags, "-dM", "-E", "-x", "c++", os.devnull]).stdout
    sources = sorted(FOLDER.glob("*.cc"))
    parts = [
        defined,
        importlib.metadata.version("jaxlib"),
        *flags,
        *(path.read_text() for path in sorted(FOLDER.glob("*.[ch]*"))),
    ]
    key = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]
    library = folder / f"kernels-{key}.so"
    if library.exists():
        return library
    logger.info("compiling the C++ kernels for this CPU into %s", library)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        made = Path(scratch) / "kernels.so"
        run([*compiler, *flags, "-isystem", jax.ffi.include_dir(), "-o", str(made), *map(str, sources)])
        made.replace(library)  # whole or not at all: other processes may be doing the same
    return library
