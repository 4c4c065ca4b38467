#!/usr/bin/env bash
# One node: measures all its GPUs, or a number of CPU ranks.
#   launch/single_node.sh                                # the built-in study
#   launch/single_node.sh train.py --lr 3e-4             # your own script, with its arguments
#   NPROC_PER_NODE=2 launch/single_node.sh --model mlp   # two ranks
# Tried here with CPU ranks; not on GPUs.

# Threads of each rank; several ranks share the node's cores (ddp-profiler doctor says how many).
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

options=(
    --standalone                                # ranks meet on this node, at a port that is free
    --nproc-per-node="${NPROC_PER_NODE:-auto}"  # ranks; auto: one for each GPU, else for each core
)
# What follows -m is the profiler; all that was given to this script goes to it.
exec torchrun "${options[@]}" -m ddp_profiler.run "$@"
