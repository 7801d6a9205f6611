"""Fixtures that several rooms' tests share; they live in modules beside this one."""

from cluster_kit import api_server, cluster_kit, node_cluster

__all__ = ["api_server", "cluster_kit", "node_cluster"]
