#!/usr/bin/env bash
# What waits for a GPU, in parts that end within ten minutes each:
#
#   benchmarks/on_gpu.sh prepare             where there is a network: what a bare GPU machine lacks, into carry/
#   benchmarks/on_gpu.sh kernels | offload | speed | predicted | large      there
#
# Results are appended to benchmarks/results and, where OUT names a directory, copied there after every command: what
# was measured before a time limit is kept. A command that fails or takes too long does not stop the next.
# LOOPS names a directory with a hand-written loop, hand.py, to be measured in the same run.
set -uo pipefail
cd "$(dirname "$0")/.."
export PYTHONUNBUFFERED=1 PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}"
python3 -c 'import pydantic' 2> /dev/null || PYTHONPATH="$PYTHONPATH:$PWD/carry"
OUT=${OUT:-}
SCRATCH=${SCRATCH:-/tmp/shoal-scratch}

measure() { # SECONDS COMMAND…
    local began=$SECONDS
    echo "== ${*:2}"
    timeout --kill-after=10 "$@" 2>&1 | tail -n 40
    echo "== exit code ${PIPESTATUS[0]}, $((SECONDS - began)) s"
    # Rows of this machine only: at most eight files come back.
    [ -z "$OUT" ] || tail -n +1 benchmarks/results/{kernels,loss,offload,predicted,shared_gpu,fp8}.jsonl | \
        grep -F "$(date -u +%Y-%m-%dT)" > "$OUT/rows.jsonl"
}
bench() { # NAME SECONDS ARGUMENTS OF shoal bench step…
    measure "$2" python3 -m shoal bench step "${@:3}" --out "${OUT:-/tmp}/$1.json"
}
hand() { # SECONDS JOB
    [ -n "${LOOPS:-}" ] || return 0
    echo "[$2]" > /tmp/jobs.py
    measure "$1" python3 "$LOOPS/hand.py" /tmp/jobs.py
}

case "${1:-}" in
prepare)
    # The GPU machine's Python is 3.12 and has torch, transformers, rich, safetensors, tokenizers, peft and numpy.
    rm -rf carry && mkdir carry
    .venv/bin/python -m pip install -q --target carry --python-version 3.12 --only-binary=:all: --no-deps \
        pydantic pydantic-core annotated-types typing-inspection typing-extensions cyclopts attrs docstring-parser \
        rich-rst docutils blake3 tomli-w
    # The two versions must belong together.
    core=$(.venv/bin/python -c 'import email, pathlib
text = next(pathlib.Path("carry").glob("pydantic-*.dist-info")).joinpath("METADATA").read_text()
print(next(r for r in email.message_from_string(text).get_all("Requires-Dist") if r.startswith("pydantic-core")))')
    .venv/bin/python -m pip install -q --upgrade --target carry --python-version 3.12 --only-binary=:all: --no-deps "$core"
    du -sh carry
    ;;
kernels)
    measure 90 python3 benchmarks/kernels.py
    measure 90 python3 benchmarks/loss.py
    measure 150 python3 benchmarks/shared_gpu.py --set compile.enabled=true \
        "pp=2,schedule=zb" "pp=2,schedule=zbv" "fsdp=2,pp=2,schedule=zb"
    bench moe 240 benchmarks/data/moe_2b.json --batch 4 --states bf16 --peers shoal,transformers-compiled \
        --rounds 3 --steps 6
    ;;
offload)
    measure 300 python3 benchmarks/offload.py llama3.2-1b --micro 8 \
        --layouts "dp=1;offload=optimizer;offload=params;floor;fsdp2"
    measure 280 python3 benchmarks/offload.py llama3-8b --micro 1 --cap-gib 48 --rounds 1 \
        --layouts "recompute=full,offload=optimizer;floor"
    ;;
speed)
    bench dense 200 llama3.2-1b --batch 8 --peers shoal,pytorch,transformers-compiled --rounds 3 --steps 8
    hand 90 'dict(tag="1b", size="1b", B=8, S=4096, prec="master", ce="fused", comp="block", sdpa="cudnn", fused="qkv", clip=True, steps=8, nb=12)'
    measure 120 python3 benchmarks/fp8.py speed llama3.2-1b --batch 8
    ;;
predicted)
    measure 290 python3 benchmarks/predicted.py unseen-compiled
    measure 280 python3 benchmarks/predicted.py unseen
    ;;
large)
    bench large 240 llama3-8b --batch 2 --states bf16 --peers shoal,pytorch --rounds 2 --steps 5
    hand 120 'dict(tag="8b", size="8b", B=2, S=4096, prec="pure", ce="fused", comp="block", sdpa="cudnn", fused="qkv", clip=True, steps=5, nb=4)'
    measure 200 python3 benchmarks/offload.py llama3.2-1b --micro 1 --cap-gib 12 --scratch "$SCRATCH" \
        --layouts "offload=optimizer@nvme"
    ;;
*)
    sed -n '2,9s/^# \{0,1\}//p' "$0"
    exit 2
    ;;
esac
