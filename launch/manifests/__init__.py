"""Check files that describe a cluster (Ray's cluster launcher, KubeRay) before any machine is requested.

Owns what this machine can check: a file's keys, and whether it fits the installed Ray. Contacts no cloud.
"""

from launch.manifests.check import check_manifest

__all__ = ["check_manifest"]
