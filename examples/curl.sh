#!/usr/bin/env bash
# One answer as JSON, then one as a stream of server-sent events with the steps of the run.
# MODEL is your backend's model; by default the first one that the server lists.
set -euo pipefail

url=${OPENAI_BASE_URL:-http://127.0.0.1:8080/v1}
key=${OPENAI_API_KEY:-none}
models=$(curl -sS --fail-with-body "$url/models" -H "Authorization: Bearer $key")
first=$(grep -o '"id": *"[^"]*"' <<<"$models" | sed -n '1s/.*"\(.*\)"/\1/p')
model=${MODEL:-$first}

curl -sS --fail-with-body "$url/chat/completions" \
  -H "Authorization: Bearer $key" \
  -H "Content-Type: application/json" \
  -d '{
    "model": "'"$model"'",
    "messages": [{"role": "user", "content": "How many primes are there below a million?"}]
  }'

echo
curl -sS --fail-with-body --no-buffer "$url/chat/completions" \
  -H "Authorization: Bearer $key" \
  -H "Content-Type: application/json" \
  -d '{
    "model": "'"$model"'",
    "messages": [{"role": "user", "content": "Which Python version is installed?"}],
    "stream": true,
    "sandbox": {"steps": "events"}
  }'
