#!/usr/bin/env bash
# Several nodes with a static rendezvous: the same command on each, with its own NODE_RANK.
#   NNODES=2 NODE_RANK=0 MASTER_ADDR=node0 launch/multi_node_static.sh --out runs/NAME  # on node 0
#   NNODES=2 NODE_RANK=1 MASTER_ADDR=node0 launch/multi_node_static.sh --out runs/NAME  # on node 1
# Nodes are numbered by you, nothing is restarted, and addresses of nodes other than 0 need no name.
# Tried with two nodes of the lab (docs/lab.md) with CPU ranks; not on GPUs.

# Threads of each rank.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

options=(
    --nnodes="${NNODES:?set NNODES to the number of nodes}"
    --node-rank="${NODE_RANK:?set NODE_RANK: 0 on the first node, 1 on the second, ...}"
    --master-addr="${MASTER_ADDR:?set MASTER_ADDR to an address of node 0}"
    --master-port="${MASTER_PORT:-29500}"       # free on node 0, and open to the others
    --nproc-per-node="${NPROC_PER_NODE:-auto}"  # ranks of a node; auto: its GPUs, else its cores
    --rdzv-conf=timeout=120                     # seconds to wait for a node that does not come
)
# The same --out on each node; they need not share a file system (docs/multi-node.md).
exec torchrun "${options[@]}" -m ddp_profiler.run "$@"
