"""Files that describe a cluster (Ray's cluster launcher, KubeRay), checked before anybody is asked for machines.

Owns what can be known of such a file on this machine: its keys, and whether it fits the Ray that is installed here. It
talks to no cloud.
"""

from launch.manifests.check import check_manifest

__all__ = ["check_manifest"]
