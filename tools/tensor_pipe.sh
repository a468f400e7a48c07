#!/usr/bin/env bash
# How busy the tensor pipe, the shared-memory data pipe, the L2 and the DRAM are in a kernel, and what its warps wait for.
#
#   tools/tensor_pipe.sh KERNEL PROGRAM [ARGUMENT...]
#   tools/tensor_pipe.sh flashmhf_forward build/forward_harness T=12288 launches=3 check=0
#
# KERNEL is a regular expression. Two launches raise the clocks and the third is profiled, at the clocks that the power
# limit allows: ncu's default base clocks would hide it.
set -euo pipefail
kernel=$1
shift
stalls=(barrier wait mio_throttle long_scoreboard math_pipe_throttle)
metrics=(
  sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed
  l1tex__data_pipe_lsu_wavefronts.avg.pct_of_peak_sustained_elapsed
  lts__throughput.avg.pct_of_peak_sustained_elapsed lts__t_sector_hit_rate.pct
  dram__throughput.avg.pct_of_peak_sustained_elapsed sm__inst_executed.avg.per_cycle_elapsed gpu__time_duration.sum
  "${stalls[@]/#/smsp__average_warps_issue_stalled_}"
)
for index in "${!metrics[@]}"; do
  [[ ${metrics[index]} == smsp__* ]] && metrics[index]+=_per_issue_active.ratio
done
IFS=, && exec ncu --clock-control none -k "regex:$kernel" --launch-skip 2 --launch-count 1 --metrics "${metrics[*]}" "$@"
