# Paceline with everything it needs, for Kubernetes (examples/cluster/kuberay*.yaml) or one machine:
#   docker build --tag paceline .
#   docker run --rm --gpus all --shm-size=8g --volume /shared:/shared paceline \
#       paceline train /shared/my.yaml run.dir=/shared/runs
# The versions are those of constraints/tested.txt, and every node of a cluster runs one image: a node with another Python, Ray,
# torch or Paceline is not used. On a machine without a GPU, smaller:
#   docker build --tag paceline --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
# Nothing secret is in the image: tokens and keys are given to containers when they start.
FROM python:3.12-slim-bookworm
ARG TORCH_INDEX=""
# g++ builds the native extension here, and kernels at run time; KubeRay's probes want wget.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ wget \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --create-home ray
WORKDIR /opt/paceline
COPY . .
RUN pip install --no-cache-dir --constraint constraints/tested.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} .
# Engines and the spot trainer have priorities of their own (cluster.yaml).
ENV RAY_worker_niceness=0
USER ray
CMD ["paceline", "--help"]
