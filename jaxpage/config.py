"""Engine options: what a user may set (``EngineArgs``) and what an engine runs with (``EngineConfig``).

Nothing here imports jax: what depends on the device arrives as arguments of ``resolve``.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import typing
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpage.checks import check_bool, check_float, check_int
from jaxpage.errors import ParameterError, shown
from jaxpage.params import SamplingParams

DEFAULT_MODEL = "smollm2-135m-instruct"
DTYPES = ("auto", "float32", "bfloat16")
KV_CACHE_DTYPES = {
    "auto": None,
    "float32": "float32",
    "bfloat16": "bfloat16",
    "int8": "int8",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}
"""Names of the option's values, which are vLLM's, to those of the types; None: as the activations."""
QUANTIZATIONS = ("int8", "int4", "fp8")
LOAD_FORMATS = ("auto", "dummy")
ATTENTION_IMPLEMENTATIONS = ("auto", "mosaic_tpu", "mosaic_gpu", "triton", "native", "xla", "reference")
PREEMPTION_MODES = ("auto", "swap", "recompute")
SCHEDULING_POLICIES = ("fcfs", "priority")
DATA_PARALLEL_BACKENDS = ("thread", "process", "ray")
GENERATION_CONFIGS = ("auto", "vllm")
"""vllm, which is vLLM's word for it: leave the model's recommendation aside."""
RECOMMENDED_VALUES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Sampling values that a checkpoint or an option may recommend for requests that leave them open."""


def _option(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    return dataclasses.field(default=default, metadata={"help": help, "choices": choices})


@dataclasses.dataclass(kw_only=True)
class EngineArgs:
    """Options of an engine under vLLM's names. None means: chosen from the model and the device.

    Raises:
        ParameterError: for a value that is wrong, or whose feature jaxpage does not have.
    """

    model: str = _option(DEFAULT_MODEL, "built-in name, Hugging Face directory, .gguf file or hub id")
    tokenizer: str | None = _option(None, "directory or .gguf file of the tokenizer, if not the model's own")
    revision: str | None = _option(None, "branch, tag or commit of a hub id")
    served_model_name: str | Sequence[str] | None = _option(
        None, "names clients may use, the first in lists and metrics; default: the value of --model"
    )
    load_format: str = _option("auto", "auto reads the checkpoint; dummy makes random weights", LOAD_FORMATS)
    dtype: str = _option("auto", "type of weights and activations; auto: float32 on CPU, else bfloat16", DTYPES)
    quantization: str | None = _option(
        None, "type the weights of the layers' matrix products are stored in; default: dtype", QUANTIZATIONS
    )
    kv_cache_dtype: str = _option(
        "auto",
        "type of the KV cache; auto: as dtype; fp8 is fp8_e4m3; int8 and fp8 have a scale per token and head",
        tuple(KV_CACHE_DTYPES),
    )
    seed: int = _option(0, "seed of requests that bring none, and of dummy weights")
    max_model_len: int | None = _option(None, "tokens of prompt and output together; default: the model's limit")
    max_num_seqs: int | None = _option(
        None, "requests in one step, never more than its tokens; default: 64 on CPU, 256 elsewhere"
    )
    max_num_batched_tokens: int | None = _option(None, "tokens in one step; default: 512 on CPU, 2048 elsewhere")
    block_size: int | None = _option(
        None, "tokens in a KV block; default: 32 on CPU, 64 on TPU (128 with kv_cache_dtype int8 or fp8), 16 on GPU"
    )
    num_gpu_blocks_override: int | None = _option(None, "exact number of KV blocks, on any platform")
    kv_cache_memory_bytes: int | None = _option(None, "bytes of the KV cache per device")
    gpu_memory_utilization: float = _option(0.9, "share of the device's memory the engine may use, on accelerators")
    swap_space: float | None = _option(
        None, "GiB of host memory for KV blocks of preempted requests; default: 4, and 0 on CPU (1 to swap there)"
    )
    preemption_mode: str = _option(
        "auto", "what becomes of a preempted request's KV blocks; auto: what costs less", PREEMPTION_MODES
    )
    enable_prefix_caching: bool = _option(True, "reuse KV blocks of equal prompt prefixes")
    enable_chunked_prefill: bool = _option(True, "split long prompts over steps")
    scheduling_policy: str = _option("fcfs", "who is served first: first come, or lowest priority", SCHEDULING_POLICIES)
    long_prefill_token_threshold: int = _option(
        0, "longer prompts leave half of a step to shorter ones; default: a quarter of max_num_batched_tokens"
    )
    max_logprobs: int = _option(20, "largest number of logprobs a request may ask for; -1: whole vocabulary")
    tensor_parallel_size: int = _option(1, "devices that share every layer")
    pipeline_parallel_size: int = _option(1, "stages a model's layers are split into, each on devices of its own")
    pipeline_layers: str | None = _option(None, "layers of each stage, such as 10,12,10; default: as equal as can be")
    data_parallel_size: int = _option(1, "engines, each on devices of its own, that share the requests")
    data_parallel_backend: str = _option("thread", "what an engine of several runs in", DATA_PARALLEL_BACKENDS)
    enable_expert_parallel: bool = _option(
        False, "the devices of tensor_parallel_size split the experts of a layer, and not each expert"
    )
    sharding: str | None = _option(
        None, "YAML file, or name of one in configs/sharding, that says which mesh axis splits which array axis"
    )
    coordinator: str | None = _option(
        None, "HOST:PORT where process 0 is reached, if an engine spans several; default: as TPU pod, SLURM or MPI say"
    )
    num_processes: int | None = _option(
        None, "processes of the engine, one a host; 1 is alone, whatever SLURM or MPI have started"
    )
    process_id: int | None = _option(None, "which of them this is; 0 serves, the others obey")
    attention_implementation: str = _option("auto", "attention code to run", ATTENTION_IMPLEMENTATIONS)
    generation_config: str = _option(
        "auto", "sampling values of requests that leave them open; auto: the model's own", GENERATION_CONFIGS
    )
    override_generation_config: Mapping[str, Any] | None = _option(
        None, 'sampling values put over those of generation_config, such as {"temperature": 0.6}'
    )
    enforce_eager: bool = _option(False, "do not compile at start: shapes are compiled when first met")
    trust_remote_code: bool = _option(False, "must stay false: code in checkpoints is never run")
    disable_log_stats: bool = _option(False, "no periodic status line")
    enable_log_requests: bool = _option(False, "log each request's arrival and end")

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            choices = field.metadata.get("choices")
            value = getattr(self, field.name)
            if choices and value not in choices and (value is not None or field.default is not None):
                raise ParameterError(field.name, f"must be one of {', '.join(choices)}, got {shown(value)}")
            if field.type == "bool":
                check_bool(field.name, getattr(self, field.name))
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "num_gpu_blocks_override"):
            if getattr(self, name) is not None:
                setattr(self, name, check_int(name, getattr(self, name), 1))
        if self.block_size is not None:
            self.block_size = check_int("block_size", self.block_size, 1, 256)
        if self.kv_cache_memory_bytes is not None:
            self.kv_cache_memory_bytes = check_int("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1)
        self.gpu_memory_utilization = check_float("gpu_memory_utilization", self.gpu_memory_utilization, 0, 1)
        if self.gpu_memory_utilization == 0:
            raise ParameterError("gpu_memory_utilization", "must be in (0, 1], got 0")
        if self.swap_space is not None:
            self.swap_space = check_float("swap_space", self.swap_space, 0)
        self.long_prefill_token_threshold = check_int(
            "long_prefill_token_threshold", self.long_prefill_token_threshold, 0
        )
        self.max_logprobs = check_int("max_logprobs", self.max_logprobs, -1)
        self.seed = check_int("seed", self.seed, -(2**63), 2**63 - 1)
        if not isinstance(self.model, str) or not self.model.strip():
            raise ParameterError("model", f"must be a name or a path, got {shown(self.model)}")
        for name in self.model_names:
            if not isinstance(name, str) or not name.strip():
                raise ParameterError("served_model_name", f"must be one or more names, got {shown(name)}")
        _check_sampling_defaults(self.override_generation_config)
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            setattr(self, name, check_int(name, getattr(self, name), 1))
        if self.pipeline_layers is not None:
            self._check_pipeline_layers()
        self._check_processes()
        if self.trust_remote_code:
            raise ParameterError("trust_remote_code", "true is not supported: code in checkpoints is never run")

    def _check_pipeline_layers(self) -> None:
        num_layers, num_stages = self.num_stage_layers, self.pipeline_parallel_size
        if num_layers is None or len(num_layers) != num_stages:
            wanted = (
                "1 number of layers" if num_stages == 1 else f"{num_stages} numbers of layers with commas between them"
            )
            raise ParameterError(
                "pipeline_layers",
                f"must be {wanted}, one for each stage (pipeline_parallel_size {num_stages}), "
                f"got {shown(self.pipeline_layers)}",
            )
        if min(num_layers) < 1:
            raise ParameterError(
                "pipeline_layers", f"must be at least 1 layer for each stage, got {shown(self.pipeline_layers)}"
            )

    def _check_processes(self) -> None:
        if self.data_parallel_backend == "ray":
            for name in ("coordinator", "process_id"):
                if getattr(self, name) is not None:
                    raise ParameterError(name, "is for Ray to choose (data_parallel_backend ray)")
        # Each by itself first: a number that cannot be is the fault, whatever else is missing or does not go with it.
        if self.num_processes is not None:
            self.num_processes = check_int("num_processes", self.num_processes, 1)
        if self.process_id is not None:
            last = None if self.num_processes is None else self.num_processes - 1
            self.process_id = check_int("process_id", self.process_id, 0, last)
        if self.coordinator is not None:
            self._check_coordinator()
        if self.data_parallel_backend != "ray" and self.num_processes != 1:
            names = ("coordinator", "num_processes", "process_id")
            missing = [name for name in names if getattr(self, name) is None]
            if 0 < len(missing) < len(names):
                raise ParameterError(missing[0], f"must be given too: {', '.join(names)} belong together")
        if self.coordinator is not None and self.data_parallel_size > 1:
            raise ParameterError(
                "data_parallel_size", "engines that span several hosts are placed by data_parallel_backend ray"
            )
        if self.num_processes is not None and self.num_devices % self.num_processes:
            raise ParameterError(
                "num_processes",
                f"{self.num_processes} do not share {self.num_devices} devices "
                "(tensor_parallel_size * pipeline_parallel_size) evenly",
            )

    def _check_coordinator(self) -> None:
        host, _, port = str(self.coordinator).rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ParameterError("coordinator", f"must be HOST:PORT, got {shown(self.coordinator)}")
        if ":" in host and not (host.startswith("[") and host.endswith("]")):
            raise ParameterError("coordinator", f"must have an IPv6 address in brackets, got {shown(self.coordinator)}")

    @property
    def num_stage_layers(self) -> list[int] | None:
        """The numbers in ``pipeline_layers``; None if it is not given or not made of numbers."""
        parts = (self.pipeline_layers or "").split(",")
        return [int(part) for part in parts] if all(re.fullmatch(r"\s*-?\d{1,6}\s*", part) for part in parts) else None

    @property
    def num_devices(self) -> int:
        """Devices of one engine."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def model_names(self) -> list[str]:
        """What clients may call the model; the first is the one that lists and metrics show."""
        names = self.served_model_name or self.model
        return [names] if isinstance(names, str) else list(names)

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Adds one ``--flag`` per field to ``parser``; booleans get a ``--no-flag`` too."""
        group = parser.add_argument_group("engine")
        hints = typing.get_type_hints(cls)
        for field in dataclasses.fields(cls):
            if field.name == "model":
                continue
            flag = "--" + field.name.replace("_", "-")
            types = [kind for kind in typing.get_args(hints[field.name]) or (hints[field.name],)]
            keyword: dict[str, Any] = {"default": field.default, "help": field.metadata["help"], "dest": field.name}
            if hints[field.name] is bool:
                keyword["action"] = argparse.BooleanOptionalAction
            elif typing.get_origin(types[0]) is Mapping:
                keyword |= {"type": _json_object, "metavar": "JSON"}
            else:
                keyword["type"] = types[0]
                if Sequence[str] in types:
                    keyword["nargs"] = "+"
                keyword["choices"] = field.metadata["choices"]
                keyword["metavar"] = None if keyword["choices"] else keyword["type"].__name__.upper()
            group.add_argument(flag, **keyword)
        group.add_argument(
            "--model", default=cls.model, metavar="MODEL", help="built-in name, directory, .gguf or hub id"
        )
        return parser

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> EngineArgs:
        """The arguments parsed by a parser that ``add_cli_args`` filled."""
        names = {field.name for field in dataclasses.fields(cls)}
        return cls(**{name: value for name, value in vars(namespace).items() if name in names})


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"must be a JSON object, got {text[:200]!r}")
    return value


def _check_sampling_defaults(values: Any) -> None:
    name = "override_generation_config"
    if values is not None and not isinstance(values, dict):
        raise ParameterError(name, f"must be an object, got {shown(values)}")
    for key in values or {}:
        if key not in RECOMMENDED_VALUES:
            raise ParameterError(name, f"may hold {', '.join(RECOMMENDED_VALUES)}, got {shown(key)}")
    try:
        SamplingParams(**(values or {}))
    except ParameterError as error:
        raise ParameterError(name, str(error)) from None


@dataclasses.dataclass(kw_only=True)
class AsyncEngineArgs(EngineArgs):
    """Options of an ``AsyncLLMEngine``; the same as ``EngineArgs``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """The sizes an engine runs with. Every field is decided.

    Attributes:
        max_blocks_per_request: width of a block table.
        num_logprobs: alternatives a step computes for each scored position.
        quantization: how the layers' linear weights are stored, a kind of ``QuantizedWeight``; None: in dtype.
        swap_space_bytes: host memory for swapped KV blocks; 0 exactly if preemption_mode is "recompute".
        preemption_mode: "auto" leaves the choice to the scheduler, request by request.
    """

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    enable_prefix_caching: bool
    enable_chunked_prefill: bool
    scheduling_policy: str
    long_prefill_token_threshold: int
    num_logprobs: int
    swap_space_bytes: int
    preemption_mode: str
    dtype: str
    quantization: str | None
    kv_cache_dtype: str
    attention_implementation: str

    @property
    def max_blocks_per_request(self) -> int:
        return -(-self.max_model_len // self.block_size)


TPU_LANES = 128
"""Numbers in a row of a TPU's memory. The scales of a quantised KV block are such rows: in shorter ones XLA would put
blocks side by side, and copy all scales in every step for the kernels."""
PLATFORM_DEFAULTS = {
    # On CPU a step is compute bound beyond some 100 tokens, so larger chunks only make others wait.
    "cpu": {"max_num_seqs": 64, "max_num_batched_tokens": 512, "block_size": 32, "dtype": "float32"},
    "gpu": {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "block_size": 16, "dtype": "bfloat16"},
    # Small blocks are slow on TPU (each is a copy of its own) and block tables must fit the scalar memory.
    "tpu": {"max_num_seqs": 256, "max_num_batched_tokens": 2048, "block_size": 64, "dtype": "bfloat16"},
}


def resolve(args: EngineArgs, *, model_max_len: int, vocab_size: int, platform: str) -> EngineConfig:
    """Fills in what ``args`` leaves open.

    Args:
        model_max_len: the longest sequence the model's positions allow, in tokens.
        platform: "cpu", "gpu" or "tpu".

    Raises:
        ParameterError: if two values contradict each other or the model.
    """
    default = PLATFORM_DEFAULTS.get(platform, PLATFORM_DEFAULTS["gpu"])
    if args.max_model_len is not None and args.max_model_len > model_max_len:
        raise ParameterError("max_model_len", f"{args.max_model_len} is above the model's limit {model_max_len}")
    max_model_len = args.max_model_len or model_max_len
    if max_model_len < 2:
        raise ParameterError("max_model_len", f"must leave room for a prompt and one token, got {max_model_len}")
    max_num_seqs = args.max_num_seqs or default["max_num_seqs"]
    budget = args.max_num_batched_tokens or max(default["max_num_batched_tokens"], max_num_seqs)
    if not args.enable_chunked_prefill:
        if args.max_num_batched_tokens is None:
            budget = max(budget, max_model_len)
        elif budget < max_model_len:
            raise ParameterError(
                "max_num_batched_tokens",
                f"{budget} is below max_model_len {max_model_len}, which needs enable_chunked_prefill",
            )
    max_logprobs = vocab_size if args.max_logprobs == -1 else min(args.max_logprobs, vocab_size)
    dtype = default["dtype"] if args.dtype == "auto" else args.dtype
    kv_cache_dtype = KV_CACHE_DTYPES[args.kv_cache_dtype] or dtype
    block_size = default["block_size"]
    if platform == "tpu" and kv_cache_dtype not in DTYPES:
        block_size = TPU_LANES
    swap_space_bytes = _swap_space_bytes(args, platform)
    return EngineConfig(
        max_model_len=max_model_len,
        max_num_seqs=min(max_num_seqs, budget),
        max_num_batched_tokens=budget,
        block_size=args.block_size or block_size,
        enable_prefix_caching=args.enable_prefix_caching,
        enable_chunked_prefill=args.enable_chunked_prefill,
        scheduling_policy=args.scheduling_policy,
        long_prefill_token_threshold=args.long_prefill_token_threshold,
        num_logprobs=max_logprobs,
        swap_space_bytes=swap_space_bytes,
        preemption_mode=args.preemption_mode if swap_space_bytes else "recompute",
        dtype=dtype,
        quantization=args.quantization,
        kv_cache_dtype=kv_cache_dtype,
        attention_implementation=args.attention_implementation,
    )


def _swap_space_bytes(args: EngineArgs, platform: str) -> int:
    if args.preemption_mode == "recompute":
        return 0
    swap_space = args.swap_space
    if swap_space is None:
        # On CPU the cache itself lies in the host's memory: more of that is worth more than a second place.
        cpu_default = 1.0 if args.preemption_mode == "swap" else 0.0
        swap_space = cpu_default if platform == "cpu" else 4.0
    if swap_space == 0 and args.preemption_mode == "swap":
        raise ParameterError("preemption_mode", "'swap' needs a swap_space above 0")
    return int(swap_space * 2**30)
