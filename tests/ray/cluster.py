"""Run by the tests of Ray: a cluster of three nodes. Each line of its input kills a node, and their end the cluster."""

import sys

from ray.cluster_utils import Cluster

cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
nodes = [cluster.add_node(num_cpus=2) for _ in range(2)]
print(cluster.address, flush=True)  # noqa: T201 - the tests read it
for _ in sys.stdin:
    cluster.remove_node(nodes.pop(), allow_graceful=False)
cluster.shutdown()
