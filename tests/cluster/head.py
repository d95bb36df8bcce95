"""A private Ray head with dashboard and token, for as long as standard input stays open. Run by test_job_submit.py."""

import json
import sys
from pathlib import Path

from launch.ray_session import ray_session

if __name__ == "__main__":
    with ray_session(cpus=16, temp_dir=Path(sys.argv[1]), dashboard=True, object_store_bytes=256 * 2**20) as session:
        print(json.dumps({"dashboard": session.dashboard_url, "address": session.address}), flush=True)
        sys.stdin.read()
