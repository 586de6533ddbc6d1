# The rollout service. VARIANT cpu: vLLM with CPU kernels; gpu: vLLM as published, which brings its CUDA libraries.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS build
ARG VARIANT=cpu
WORKDIR /build
ENV PIP_NO_CACHE_DIR=1
COPY scripts/install.sh scripts/
COPY requirements/rollout-cpu.lock requirements/
COPY deploy/install.sh deploy/
COPY pyproject.toml LICENSE ./
RUN sh deploy/install.sh "$VARIANT" rollout-cpu rollout

FROM ${BASE}
ARG VARIANT=cpu
COPY deploy/user.sh /tmp/
RUN sh /tmp/user.sh
# vLLM's CPU kernels are linked with libnuma.
RUN apt-get update -q && apt-get install -qy --no-install-recommends libnuma1 && rm -rf /var/lib/apt/lists/*
# vLLM compiles kernels as it starts on a GPU.
RUN [ "$VARIANT" != gpu ] || { apt-get update -q && apt-get install -qy --no-install-recommends gcc g++ libc6-dev \
    && rm -rf /var/lib/apt/lists/*; }
COPY --from=build /opt/venv /opt/venv
WORKDIR /app
COPY trireme trireme
COPY services/__init__.py services/
COPY services/rollout services/rollout
COPY deploy/healthcheck.py deploy/
USER trireme
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
EXPOSE 50051 9090
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s CMD ["python", "deploy/healthcheck.py", "50051"]
# Replicas need names of their own in a run: the container's.
ENTRYPOINT ["sh", "-c", "exec python -m services.rollout --name \"rollout-$HOSTNAME\" \"$@\"", "rollout"]
