#!/usr/bin/env bash
# Several nodes with a c10d rendezvous: the very same command on each; torchrun numbers the nodes.
#   NNODES=2 MASTER_ADDR=node0 launch/multi_node_c10d.sh --out runs/NAME  # on each node
# Each node's hostname must resolve on the others: torchrun lets ranks meet at the name of the node
# that it numbers 0 (ddp-profiler doctor --nodes 2 looks at that).
# Tried with two nodes of the lab (docs/lab.md) with CPU ranks; not on GPUs.

# Threads of each rank.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

options=(
    --nnodes="${NNODES:?set NNODES to the number of nodes}"
    --rdzv-backend=c10d                         # a store of torch's own; nothing to install
    # Where the agents meet: an address of any one node, and a port that is free on it.
    --rdzv-endpoint="${MASTER_ADDR:?set MASTER_ADDR to an address of one node}:${MASTER_PORT:-29500}"
    --rdzv-id="${JOB_ID:-ddp-profiler}"         # the same on all nodes, another one for each job
    --rdzv-conf=join_timeout=120                # seconds to wait for a node that does not come
    --nproc-per-node="${NPROC_PER_NODE:-auto}"  # ranks of a node; auto: its GPUs, else its cores
)
# The same --out on each node; they need not share a file system (docs/multi-node.md).
exec torchrun "${options[@]}" -m ddp_profiler.run "$@"
