#!/usr/bin/env bash
# The server with nothing but curl. URL=http://host:port, KEY=... if the server has one.
set -euo pipefail
url=${URL:-http://127.0.0.1:8000}
auth=(-H "Authorization: Bearer ${KEY:-none}" -H "Content-Type: application/json")

expect() { # NAME PATTERN: checks standard input
    local answer
    answer=$(cat)
    if grep -q -- "$2" <<<"$answer"; then echo "ok    $1"; else printf 'WRONG %s\n%s\n' "$1" "$answer"; exit 1; fi
}

curl -sS -o /dev/null -w '%{http_code}' "$url/health" | expect "health" '^200$'
curl -sS "${auth[@]}" "$url/v1/models" | expect "models" '"object":"list"'
chat='{"messages": [{"role": "user", "content": "What is the capital of France?"}], "max_tokens": 16, "temperature": 0'
curl -sS "${auth[@]}" "$url/v1/chat/completions" -d "$chat}" | expect "chat" '"object":"chat.completion"'
curl -sSN "${auth[@]}" "$url/v1/chat/completions" -d "$chat, \"stream\": true}" | tail -n 2 | expect "stream" '^data: \[DONE\]'
curl -sS "${auth[@]}" "$url/v1/completions" -d '{"prompt": "1, 2, 3,", "max_tokens": 4, "temperature": 0}' |
    expect "completion" '"text":'
curl -sS "${auth[@]}" "$url/v1/completions" -d '{"prompt": "x", "max_tokens": 4, "structured_outputs": {"choice": ["yes", "no"]}}' |
    expect "choice" '"text":"\(yes\|no\)"'
curl -sS "${auth[@]}" "$url/v1/embeddings" -d '{"input": "hello"}' | expect "embedding" '"embedding":\['
curl -sS "${auth[@]}" "$url/tokenize" -d '{"prompt": "hello"}' | expect "tokenize" '"count":'
curl -sS "$url/metrics" | expect "metrics" '^jaxpage:generation_tokens_total'
curl -sS "${auth[@]}" "$url/v1/completions" -d '{"prompt": ""}' | expect "an error names the field" '"param":"prompt"'
