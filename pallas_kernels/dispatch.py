"""The one place that picks the implementation of an operation: in order of preference, passing over what refuses.

It must not know what any operation computes, only where the implementations lie: operation ``op`` is the folder
``pallas_kernels/op``, and each implementation a module in it with a function named ``op``; a folder of several
operations has ``op.name``, the function ``name`` of such a module.

How "auto" picks. Implementations in ``PORTABLE`` take every case on every platform. Those before them in ``ORDER`` are
kernels for one platform, which take part only if their module imports (JAX may lack the backend), the device suits and
a probe passes: the call, by shapes alone, is traced, lowered for the platform and, where a device of that platform is
at hand, compiled; of ``COMPILED`` kernels, which are finished code by then, tracing is all. A kernel that raises
NotImplementedError, or that this JAX or this chip cannot compile, is passed over with its reason and never breaks the
program around it. A probe runs once a shape. Kernels have no derivatives: who wants some names "xla".

Which device. That of the abstract mesh around the call, if it names one, else the one at hand. Without either a probe
for "gpu" lowers for an H100; the program itself JAX from 0.11 on then lowers inside such a mesh only.

Which platform. JAX tells a traced function nothing about the platform it will be lowered for, so it is the
``platform`` argument or else that of the default device (``jax.default_device``, ``jax.default_backend()``). A program
traced for one platform and lowered for another needs the argument, or tracing (not lowering) inside
``jax.default_device("tpu")``, which wants no TPU; without either a CPU machine picks what runs there.
``lax.platform_dependent`` would settle it at lowering time but trace every kernel on every platform, once a layer and
shape, and could not pass over one that fails to lower.

Logger "pallas_kernels" says at level INFO which implementation each shape gets and why others were passed over;
``JAXPAGE_LOG=kernels`` in the environment shows it on stderr.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from pallas_kernels.targets import TARGETS, compute_capability

ORDER = {"tpu": ("mosaic_tpu", "xla"), "gpu": ("mosaic_gpu", "triton", "xla"), "cpu": ("native", "xla")}
"""Implementations by preference, for each platform; an operation may lack some. Other platforms take "xla"."""
PORTABLE = ("xla", "reference")
"""Implementations in plain jax.numpy: they take every case, lower for every platform and are not probed."""
COMPILED = ("native",)
"""Implementations that no compiler of XLA's sees."""
LOWERING_PLATFORMS = {"tpu": "tpu", "gpu": "cuda", "cpu": "cpu"}
MIN_CAPABILITY = {"mosaic_gpu": 9.0, "triton": 8.0}
"""Least compute capability of an NVIDIA GPU for an implementation."""

logger = logging.getLogger("pallas_kernels")


class Choice(NamedTuple):
    """What was picked.

    Attributes:
        implementation: its name.
        function: the implementation itself.
        refusals: why each more preferred implementation was passed over, by name.
    """

    implementation: str
    function: Callable[..., Any]
    refusals: Mapping[str, str]

    def __str__(self) -> str:
        return "; ".join([self.implementation, *(f"not {name}: {why}" for name, why in self.refusals.items())])


def choose(
    operation: str,
    names: Sequence[str],
    arrays: Mapping[str, Any],
    options: Mapping[str, Any],
    *,
    implementation: str = "auto",
    platform: str | None = None,
) -> Choice:
    """Picks the implementation of a call, at trace time.

    Args:
        operation: a folder of this package, or ``folder.function``.
        names: its implementations.
        arrays: array arguments by name, or their ``jax.ShapeDtypeStruct``; None for one left out.
        options: the other arguments by name, hashable.
        implementation: one of ``names``, which is then taken unprobed, or "auto".
        platform: "cpu", "gpu" or "tpu", where the call is going to run; None means the default device's.

    Raises:
        ValueError: for an unknown implementation or platform.
        NotImplementedError: if the implementation asked for cannot be imported, or none takes the case.
    """
    if implementation != "auto" and implementation not in names:
        raise ValueError(f"implementation must be auto or one of {', '.join(names)}, got {implementation!r:.200}")
    if platform is not None and platform not in ORDER:
        raise ValueError(f"platform must be one of {', '.join(ORDER)}, got {platform!r:.200}")
    if implementation != "auto":
        return Choice(implementation, _load(operation, implementation), {})
    platform = platform or default_platform()
    device_kind = _abstract_device_kind()
    structs = tuple((name, None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype)) for name, x in arrays.items())
    refusals = {}
    for name in ORDER.get(platform, ("xla",)):
        if name not in names:
            continue
        try:
            function = _load(operation, name)
            if name not in PORTABLE:
                _check_device(name, platform)
                refusal = _probe(
                    function,
                    structs,
                    tuple(options.items()),
                    platform,
                    device_kind,
                    _has_device(platform),
                    name in COMPILED,
                )
                if refusal:
                    raise NotImplementedError(refusal)
        except NotImplementedError as error:
            refusals[name] = str(error)
            continue
        choice = Choice(name, function, refusals)
        _say_once(f"{operation} {_shown(structs)} on {platform}: {choice}")
        return choice
    raise NotImplementedError("; ".join(f"{name}: {why}" for name, why in refusals.items()))


def default_platform() -> str:
    """Platform that a computation traced here runs on: that of the mesh around it, else of the default device."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if device is None:
        device = jax.config.jax_default_device  # pyright: ignore[reportAttributeAccessIssue]
    platform = jax.default_backend() if device is None else getattr(device, "platform", device)
    return {"cuda": "gpu", "rocm": "gpu"}.get(platform, platform)


def _load(operation: str, name: str) -> Callable[..., Any]:
    """The function of an implementation. A kernel whose backend this JAX lacks, or names otherwise, is unavailable."""
    folder, _, function = operation.partition(".")
    if name == "triton":
        # Said by JAX from 0.11 on whenever such a kernel is lowered; it must not end programs run with -W error.
        message = "The Pallas Triton backend is deprecated"
        warnings.filterwarnings("ignore", message=message, category=DeprecationWarning)
    try:
        module = importlib.import_module(f"pallas_kernels.{folder}.{name}")
    except (ImportError, AttributeError) as error:
        raise NotImplementedError(f"cannot be imported: {error}") from error
    return getattr(module, function or folder)


def _has_device(platform: str) -> bool:
    """Whether a device of the kind that is traced for is here."""
    device = jax.devices()[0]
    return device.platform == platform and _abstract_device_kind() in (None, getattr(device, "device_kind", None))


def _abstract_device_kind() -> str | None:
    """Kind of device of the abstract mesh around the call: what it is traced for, be it here or not."""
    device = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    return None if device is None else device.device_kind


def _check_device(name: str, platform: str) -> None:
    """Raises NotImplementedError if the device traced for is too old; one that is not known is not judged."""
    least = MIN_CAPABILITY.get(name)
    capability: Any = compute_capability()
    if least is None or (capability is None and not _has_device(platform)):
        return
    if capability is None:
        capability = str(getattr(jax.devices()[0], "compute_capability", "unknown"))
    try:
        suits = float(capability) >= least
    except ValueError:  # other vendors name theirs
        suits = False
    if not suits:
        raise NotImplementedError(f"needs compute capability {least}, the device has {capability}")


@functools.cache
def _probe(
    function: Callable[..., Any],
    structs: tuple[tuple[str, jax.ShapeDtypeStruct | None], ...],
    options: tuple[tuple[str, Any], ...],
    platform: str,
    device_kind: str | None,
    has_device: bool,
    is_compiled: bool,
) -> str | None:
    """Why a kernel does not take a case; None if it compiles, or lowers where there is no device to compile for.

    Args:
        is_compiled: there is nothing to compile or lower.
        device_kind: that of the abstract mesh around the call, if any; what JAX lowers depends on it.
    """
    jitted = jax.jit(functools.partial(function, **dict(options)))
    try:
        if is_compiled:
            jitted.trace(**dict(structs))
        elif has_device:
            jitted.trace(**dict(structs)).lower().compile()
        else:
            mesh = jax.sharding.get_abstract_mesh()
            if platform == "gpu" and device_kind is None and mesh.empty:
                device = jax.sharding.AbstractDevice(TARGETS["h100"].device_kind, None, "gpu")
                mesh = jax.sharding.AbstractMesh((1,), ("device",), abstract_device=device)
            # The default device may be the name of a platform without devices.
            with jax.default_device(None), jax.sharding.use_abstract_mesh(mesh):
                jitted.trace(**dict(structs)).lower(lowering_platforms=(LOWERING_PLATFORMS[platform],))
    except NotImplementedError as error:
        return str(error) or "not implemented"
    except Exception as error:  # whatever a compiler comes up with, another implementation can do the work
        reason = f"does not compile: {type(error).__name__}: {str(error)[:500]}"
        level = logging.WARNING if has_device else logging.INFO
        logger.log(level, "%s, %s on %s: %s", function.__module__, _shown(structs), platform, reason)
        return reason
    return None


def _shown(structs: Sequence[tuple[str, jax.ShapeDtypeStruct | None]]) -> str:
    return ", ".join(f"{name} {struct.dtype}{list(struct.shape)}" for name, struct in structs if struct is not None)


@functools.cache
def _say_once(text: str) -> None:
    logger.info("%s", text)


def _show_log_if_asked() -> None:
    if "kernels" in os.environ.get("JAXPAGE_LOG", "").split(","):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(name)s: %(message)s"))
        logger.addHandler(handler)
        logger.setLevel(logging.INFO)
        logger.propagate = False  # else a program that sets up logging itself shows each line twice


_show_log_if_asked()
