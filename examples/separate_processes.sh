#!/usr/bin/env bash
# Router and workers as separate commands, as you would start them on separate terminals or machines.
# Any order works: workers wait for the router, the router says in /ready what is missing. Ctrl-C stops all three.
set -euo pipefail
cd "$(dirname "$0")/.."
disagg=.venv/bin/disagg

trap 'kill $(jobs -p) 2>/dev/null; wait' EXIT
"$disagg" worker smollm2 --role decode --worker-id d0 --router-address 127.0.0.1:8001 &
"$disagg" worker smollm2 --role prefill --worker-id p0 --router-address 127.0.0.1:8001 &
"$disagg" router --model smollm2 --port 8000 --control-port 8001 --local-prefill-tokens 0 &

for _ in $(seq 120); do
  curl --silent --fail http://127.0.0.1:8000/ready >/dev/null && break
  curl --silent http://127.0.0.1:8000/ready | head -c 200 || true
  echo
  sleep 1
done
curl --silent http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \
  -d '{"model": "smollm2", "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0}'
echo
