"""Runs the decode workload in another engine, on the same weights, in that engine's own Python environment.

This file is also the script that runs there: it must not import jaxpage at the top.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PEERS = ("transformers", "vllm")


def measure(
    peer: str, python: str, model_dir: Path, prompts: list[str], batches: list[int], new_tokens: int
) -> dict[str, Any]:
    """Tokens per second of ``peer`` by batch size, and its seconds from start to ready.

    Args:
        python: interpreter of an environment that has the peer.
        model_dir: Hugging Face directory with float32 weights (see ``export``).

    Raises:
        RuntimeError: with the end of the peer's output if it fails.
    """
    job = {"peer": peer, "model": str(model_dir), "prompts": prompts, "batches": batches, "new_tokens": new_tokens}
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_CPU_KVCACHE_SPACE": "4"}
    environment.pop("PYTHONPATH", None)
    done = subprocess.run(
        [python, __file__, json.dumps(job)],
        capture_output=True, text=True, env=environment, cwd=model_dir, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode or not lines:
        raise RuntimeError(f"{peer} failed:\n{(done.stdout + done.stderr)[-2000:]}")
    return json.loads(lines[-1].removeprefix("RESULT "))


def export(model: str, directory: Path, revision: str | None = None) -> Path:
    """Writes a model jaxpage can load as a float32 Hugging Face directory, so that peers run exactly its weights."""
    import numpy as np
    import safetensors.numpy

    from jaxpage.errors import ParameterError
    from jaxpage.weights.source import OrbaxCheckpoint, open_checkpoint, resolve_model

    checkpoint = open_checkpoint(resolve_model(model, revision))
    if isinstance(checkpoint, OrbaxCheckpoint):
        raise ParameterError("model", f"must be what a checkpoint is made of, got one that jaxpage wrote: {model}")
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.ascontiguousarray(checkpoint.read(name), np.float32) for name in checkpoint.names()}
    safetensors.numpy.save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps({**checkpoint.config, "torch_dtype": "float32"}))
    (directory / "generation_config.json").write_text(json.dumps(checkpoint.generation_config))
    tokenizer = checkpoint.load_tokenizer()
    tokenizer.save(directory / "tokenizer.json")
    (directory / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokenizer.eos_token})
    )
    return directory


def _vllm(job: dict[str, Any]) -> Any:
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    llm = LLM(model=job["model"], dtype="float32", max_model_len=2048, max_num_seqs=64)
    params = SamplingParams(temperature=0, max_tokens=job["new_tokens"], ignore_eos=True)
    return lambda prompts: llm.generate(prompts, params, use_tqdm=False)


def _transformers(job: dict[str, Any]) -> Any:
    import torch  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(job["model"], padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32).eval()
    count = job["new_tokens"]

    def generate(prompts: list[str]) -> None:
        inputs = tokenizer(prompts, return_tensors="pt", padding=True)
        inputs.pop("token_type_ids", None)
        with torch.inference_mode():
            model.generate(**inputs, max_new_tokens=count, min_new_tokens=count, do_sample=False)

    return generate


def _main(job: dict[str, Any]) -> None:
    started = time.perf_counter()
    generate = {"vllm": _vllm, "transformers": _transformers}[job["peer"]](job)
    result: dict[str, Any] = {"ready_s": time.perf_counter() - started, "tokens_per_s": {}}
    generate(job["prompts"][:1])
    for batch in job["batches"]:
        rates = []
        for repeat in range(2):
            # Other prompts each time, so that no prefix cache helps.
            prompts = [f"{batch}.{repeat} {prompt}" for prompt in job["prompts"][:batch]]
            begun = time.perf_counter()
            generate(prompts)
            rates.append(batch * job["new_tokens"] / (time.perf_counter() - begun))
        result["tokens_per_s"][str(batch)] = max(rates)
    print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    sys.path.pop(0)  # this folder: peers have modules of the same names, such as "kernels"
    _main(json.loads(sys.argv[1]))
