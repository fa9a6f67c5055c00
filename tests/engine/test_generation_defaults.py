"""Whose sampling values hold where a request leaves them open: the checkpoint's, the operator's or the usual ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxpage import LLM


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"override_generation_config": {"temperature": 0.2}}, (0.2, 40)),
        ({"generation_config": "vllm", "override_generation_config": {"top_k": 7}}, (1.0, 7)),
    ],
)
def test_recommended_values(
    tmp_path: Path, random_model: Callable[..., Any], options: dict[str, Any], expected: tuple[float, int]
) -> None:
    shutil.copytree(random_model().directory, tmp_path, dirs_exist_ok=True)
    recommended = {"temperature": 0.6, "top_k": 40, "eos_token_id": 65}
    (tmp_path / "generation_config.json").write_text(json.dumps(recommended))
    llm = LLM(
        model=str(tmp_path), max_model_len=64, max_num_seqs=2, enforce_eager=True, num_gpu_blocks_override=8, **options
    )
    default = llm.get_default_sampling_params()
    assert (default.temperature, default.top_k or 0) == expected
    assert 65 in llm.engine.model.end_token_ids, "end ids are no matter of taste"
