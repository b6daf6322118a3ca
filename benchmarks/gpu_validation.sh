#!/usr/bin/env bash
# Calibration and validation on the GPUs of this machine, in less than six minutes:
#
#     benchmarks/gpu_validation.sh [FOLDER] [--set KEY=VALUE ...]
#
# The folder, gpu-validation when absent, gets the machine's file, the tables of op times and of
# kernels, the errors of every replay, the figure and what was printed. With two GPUs or more each
# rank has its own and NCCL; with one the ranks take turns on it, which tells op times, memory, losses
# and gradients, but nothing of overlap and links. DEVICE=cpu tries the script without a GPU.
set -euo pipefail

out=gpu-validation
if [[ $# -gt 0 && $1 != --* ]]; then
  out=$1
  shift
fi
mkdir -p "$out"
python=${PYTHON:-python}
if [[ -z ${DEVICE:-} ]]; then
  gpus=$($python -c 'import torch; print(torch.cuda.device_count())')
  case $gpus in
    0) echo "torch finds no GPU here; DEVICE=cpu tries the script without one" >&2 && exit 2 ;;
    1) DEVICE=cuda-shared ;;
    *) DEVICE=cuda ;;
  esac
fi
# A GPT whose forwards take some ten milliseconds in fp32 on a large GPU.
size=(
  --set model.hidden_size=1024 --set model.intermediate_size=4096 --set model.head_dim=64
  --set model.num_attention_heads=16 --set model.num_key_value_heads=16
  --set model.num_hidden_layers=8 --set model.vocab_size=16384
  --set model.max_position_embeddings=2048 --set run.sequence_length=2048
)
run() {
  local limit=$1 verb=$2
  shift 2
  echo "\$ trainsim $verb $*"
  timeout "$limit" $python -m simulator $verb gpt-replay-2ranks --device "$DEVICE" "${size[@]}" "$@"
}
{
  date -u +%FT%TZ
  run 80 calibrate --out "$out/ops.json" --kernels "$out/kernels.toml" "$@"
  run 190 "validate torch" --schedules "${SCHEDULES:-GPipe,1F1B,Interleaved1F1B,ZB-H1}" \
    --microbatches "${MICROBATCHES:-8}" --also plan.pp=1,plan.dp=2 --also plan.pp=1,plan.tp=2 \
    --visits 3 --json "$out/replays.json" --machine "$out/machine.json" "$@"
  run 60 "validate torch" --set plan.schedule=ZB-H1 --visits 2 --json "$out/overlay.json" \
    --plot "$out/overlay.png" --timeline "$out/spans.json" "$@"
} 2>&1 | tee "$out/printed.txt"
