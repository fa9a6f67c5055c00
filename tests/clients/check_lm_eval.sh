#!/usr/bin/env bash
# lm-eval over HTTP with the server's tokenizer; with HF_MODEL=DIR also with transformers, answer by answer the same.
# URL=http://host:port MODEL=name LIMIT=rows OUT=folder
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
url=${URL:-http://127.0.0.1:8000} model=${MODEL:-smollm2-135m-instruct} limit=${LIMIT:-20}
out=${OUT:-$(mktemp -d)}
mkdir -p "$out/tasks"
for task in gsm8k_rows gsm8k_choice; do
    sed "s|ROWS|$here/../data/gsm8k/test_first40.jsonl|" "$here/lm_eval/$task.yaml" >"$out/tasks/$task.yaml"
done
export HF_DATASETS_OFFLINE=1 HF_HUB_OFFLINE=1 OPENAI_API_KEY=${KEY:-none}
common=(--tasks gsm8k_rows,gsm8k_choice --include_path "$out/tasks" --limit "$limit" --log_samples --seed 1234)

lm_eval run --model local-completions "${common[@]}" --output_path "$out/server" --model_args \
    "model=$model,base_url=$url/v1/completions,tokenizer_backend=remote,num_concurrent=4,max_retries=1,max_length=2048"
if [[ -n ${HF_MODEL:-} ]]; then
    lm_eval run --model hf "${common[@]}" --output_path "$out/transformers" --model_args \
        "pretrained=$HF_MODEL,dtype=float32,max_length=2048" --device cpu --batch_size 1
    python3 "$here/lm_eval/compare.py" "$out/server" "$out/transformers"
fi
echo "results: $out"
