# TraPPM with everything that it needs baked in, for heads and GPU workers alike: nothing is
# downloaded when a node starts.
#   docker build -t trappm .
#   docker run --rm --gpus all trappm trappm measure resnet18 --device cuda:0
# The wheels built with CUDA 12.6 know the A100 and the V100; they bring CUDA along, so the host
# needs NVIDIA's driver and container toolkit only. For a head without a GPU, a much smaller image:
#   docker build -t trappm --build-arg TORCH_INDEX=https://download.pytorch.org/whl/cpu .
FROM python:3.12-slim

# KubeRay probes its pods with wget, and torch needs libgomp.
RUN apt-get update -q \
    && apt-get install -q -y --no-install-recommends wget libgomp1 \
    && rm -rf /var/lib/apt/lists/*

ARG TORCH_INDEX=https://download.pytorch.org/whl/cu126
WORKDIR /opt/trappm
# First what rarely changes, so that a new version of TraPPM does not fetch torch again.
COPY constraints.txt ./
# PyTorch's index is an extra one, next to pip's default. Its builds win where the versions are equal,
# because pip sorts 2.13.0+cu126 above 2.13.0.
RUN pip install --no-cache-dir -c constraints.txt torch torchvision --extra-index-url "$TORCH_INDEX"
COPY pyproject.toml README.md LICENSE ./
COPY cluster cluster
COPY learner learner
COPY profiler profiler
COPY store store
COPY trappm trappm
RUN pip install --no-cache-dir -c constraints.txt '.[postgresql,serve]' 'ray[default]'

# No reports to Ray's makers, nobody without the token, and workers that give way to nobody.
ENV RAY_AUTH_MODE=token \
    RAY_USAGE_STATS_ENABLED=0 \
    RAY_worker_niceness=0 \
    TRAPPM_HOME=/data

RUN useradd --uid 1000 --create-home trappm && mkdir /data && chown trappm /data
USER trappm
WORKDIR /home/trappm
