"""Compares the samples of two lm-eval runs, row by row; exits with 1 if an answer or a score differs."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

TOLERANCE = 2e-3
"""Of a log-likelihood, which is a sum over some tokens in float32."""


def samples(folder: str, task: str) -> dict[int, dict[str, Any]]:
    [file] = Path(folder).rglob(f"samples_{task}_*.jsonl")
    rows = map(json.loads, file.read_text(encoding="utf-8").splitlines())
    return {row["doc_id"]: row for row in rows}


def differences(ours: str, theirs: str) -> list[str]:
    found = []
    for task in ("gsm8k_rows", "gsm8k_choice"):
        mine, other = samples(ours, task), samples(theirs, task)
        assert mine.keys() == other.keys() and mine, f"{task}: other rows"
        metric = "exact_match" if task == "gsm8k_rows" else "acc"
        scores = [sum(float(row[metric]) for row in rows.values()) / len(rows) for rows in (mine, other)]
        print(f"{task}: {len(mine)} rows, {metric} {scores[0]:.3f} and {scores[1]:.3f}")
        for row in mine:
            a, b = mine[row]["resps"], other[row]["resps"]
            if task == "gsm8k_rows":
                same = a == b
            else:
                same = all(
                    abs(float(x[0][0]) - float(y[0][0])) < TOLERANCE and str(x[0][1]) == str(y[0][1])
                    for x, y in zip(a, b, strict=True)
                )
            if not same:
                found.append(f"{task} row {row}: {a} and {b}")
    return found


if __name__ == "__main__":
    wrong = differences(sys.argv[1], sys.argv[2])
    print("\n".join(wrong) or "all answers and scores are the same")
    sys.exit(bool(wrong))
