"""The fields of KubeRay's RayCluster and RayJob, apiVersion ray.io/v1. An unknown one is an error, as an API server
that prunes unknown fields would not say.

Names, types and choices are those of the operator's API up to 1.6 (its Go types and the head and tail of its CRD were
read); a pod template is checked by the names of Kubernetes 1.35 down to its containers, not below.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue
from pydantic.alias_generators import to_camel

Object = dict[str, JsonValue]


class _Strict(BaseModel):
    model_config = ConfigDict(
        extra="forbid", strict=True, frozen=True, alias_generator=to_camel, populate_by_name=False
    )


class Container(_Strict):
    name: str
    image: str
    args: list[str] = []
    command: list[str] = []
    env: list[Object] = []
    env_from: list[Object] = []
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    lifecycle: dict[Literal["postStart", "preStop", "stopSignal"], JsonValue] = {}
    liveness_probe: Object = {}
    ports: list[Object] = []
    readiness_probe: Object = {}
    resize_policy: list[Object] = []
    resources: dict[str, Any] = {}
    restart_policy: str | None = None
    restart_policy_rules: list[Object] = []
    security_context: Object = {}
    startup_probe: Object = {}
    stdin: bool = False
    stdin_once: bool = False
    termination_message_path: str | None = None
    termination_message_policy: str | None = None
    tty: bool = False
    volume_devices: list[Object] = []
    volume_mounts: list[Object] = []
    working_dir: str | None = None


class PodSpec(_Strict):
    containers: list[Container] = Field(min_length=1)
    active_deadline_seconds: int | None = None
    affinity: Object = {}
    automount_service_account_token: bool | None = None
    dns_config: Object = {}
    dns_policy: str | None = None
    enable_service_links: bool | None = None
    ephemeral_containers: list[Object] = []
    host_aliases: list[Object] = []
    host_ipc: bool = Field(False, alias="hostIPC")
    host_network: bool = False
    host_pid: bool = Field(False, alias="hostPID")
    host_users: bool | None = None
    hostname: str | None = None
    hostname_override: str | None = None
    image_pull_secrets: list[Object] = []
    init_containers: list[Container] = []
    node_name: str | None = None
    node_selector: dict[str, str] = {}
    os: Object = {}
    overhead: Object = {}
    preemption_policy: str | None = None
    priority: int | None = None
    priority_class_name: str | None = None
    readiness_gates: list[Object] = []
    resource_claims: list[Object] = []
    resources: dict[str, Any] = {}
    restart_policy: Literal["Always", "OnFailure", "Never"] | None = None
    runtime_class_name: str | None = None
    scheduler_name: str | None = None
    scheduling_gates: list[Object] = []
    security_context: Object = {}
    service_account: str | None = None
    service_account_name: str | None = None
    set_hostname_as_fqdn: bool | None = Field(None, alias="setHostnameAsFQDN")
    share_process_namespace: bool | None = None
    subdomain: str | None = None
    termination_grace_period_seconds: int | None = Field(None, ge=0)
    tolerations: list[Object] = []
    topology_spread_constraints: list[Object] = []
    volumes: list[Object] = []
    workload_ref: Object = {}


class PodTemplate(_Strict):
    spec: PodSpec
    metadata: Object = {}


class _PodGroup(_Strict):
    template: PodTemplate
    ray_start_params: dict[str, str] = {}
    labels: dict[str, str] = {}
    resources: dict[str, str] = {}


class HeadGroup(_PodGroup):
    enable_ingress: bool | None = None
    head_service: Object = {}
    service_type: Literal["ClusterIP", "NodePort", "LoadBalancer", "ExternalName"] | None = None


class WorkerGroup(_PodGroup):
    group_name: str
    min_replicas: int = Field(ge=0)
    max_replicas: int = Field(ge=0)
    replicas: int | None = Field(None, ge=0)
    num_of_hosts: int = Field(1, ge=1)
    idle_timeout_seconds: int | None = Field(None, ge=0)
    scale_strategy: Object = {}
    suspend: bool | None = None


class AuthOptions(_Strict):
    mode: Literal["disabled", "token"] = "token"
    enable_k8s_token_auth: bool | None = None
    secret_name: str | None = None


class AutoscalerOptions(_Strict):
    env: list[Object] = []
    env_from: list[Object] = []
    idle_timeout_seconds: int | None = Field(None, ge=0)
    image: str | None = None
    image_pull_policy: Literal["Always", "IfNotPresent", "Never"] | None = None
    resources: dict[str, Any] = {}
    security_context: Object = {}
    upscaling_mode: Literal["Default", "Aggressive", "Conservative"] | None = None
    version: Literal["v1", "v2"] | None = None
    volume_mounts: list[Object] = []


class RayClusterSpec(_Strict):
    head_group_spec: HeadGroup
    worker_group_specs: list[WorkerGroup] = []
    ray_version: str | None = None
    auth_options: AuthOptions | None = None
    autoscaler_options: AutoscalerOptions | None = None
    enable_in_tree_autoscaling: bool | None = None
    gcs_fault_tolerance_options: Object = {}
    head_service_annotations: dict[str, str] = {}
    managed_by: Literal["ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue"] | None = None
    suspend: bool | None = None
    upgrade_strategy: Object = {}


class RayJobSpec(_Strict):
    entrypoint: str
    ray_cluster_spec: RayClusterSpec | None = None
    active_deadline_seconds: int | None = Field(None, gt=0)
    backoff_limit: int = Field(0, ge=0)
    cluster_selector: dict[str, str] = {}
    deletion_strategy: Object = {}
    entrypoint_num_cpus: float | None = None
    entrypoint_num_gpus: float | None = None
    entrypoint_resources: str | None = None
    job_id: str | None = None
    managed_by: Literal["ray.io/kuberay-operator", "kueue.x-k8s.io/multikueue"] | None = None
    metadata: dict[str, str] = {}
    pre_running_deadline_seconds: int | None = Field(None, gt=0)
    runtime_env_yaml: str | None = Field(None, alias="runtimeEnvYAML")
    shutdown_after_job_finishes: bool = False
    submission_mode: Literal["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"] = "K8sJobMode"
    submitter_config: Object = {}
    submitter_pod_template: PodTemplate | None = None
    suspend: bool | None = None
    ttl_seconds_after_finished: int = Field(0, ge=0)


class _Named(_Strict):
    api_version: Literal["ray.io/v1"]
    metadata: dict[str, Any]


class RayCluster(_Named):
    kind: Literal["RayCluster"]
    spec: RayClusterSpec


class RayJob(_Named):
    kind: Literal["RayJob"]
    spec: RayJobSpec


KINDS: dict[str, type[RayCluster] | type[RayJob]] = {"RayCluster": RayCluster, "RayJob": RayJob}
