# The rollout service. VARIANT cpu: vLLM with CPU kernels; gpu: vLLM as published, which brings its CUDA libraries.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
ARG VARIANT=cpu
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
# vLLM compiles kernels when it runs on a GPU.
RUN if [ "$VARIANT" = gpu ]; then apt-get update -q && apt-get install -qy --no-install-recommends gcc g++ \
    && rm -rf /var/lib/apt/lists/*; fi
WORKDIR /app
COPY scripts/install.sh scripts/
COPY requirements/rollout-cpu.lock requirements/
COPY deploy/install.sh deploy/
COPY pyproject.toml README.md LICENSE ./
RUN sh deploy/install.sh "$VARIANT" rollout-cpu rollout
COPY trireme trireme
COPY services/__init__.py services/
COPY services/rollout services/rollout
COPY deploy/healthcheck.py deploy/
USER trireme
ENV HF_HUB_OFFLINE=1 VLLM_NO_USAGE_STATS=1
EXPOSE 50051 9090
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s CMD ["python3", "-m", "deploy.healthcheck", "50051"]
ENTRYPOINT ["python3", "-m", "services.rollout"]
