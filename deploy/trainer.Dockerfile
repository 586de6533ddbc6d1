# The trainer. VARIANT cpu: a CPU build of torch; gpu: on a BASE that brings CUDA, torch and Transformer Engine.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
ARG VARIANT=cpu
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /app
COPY scripts/install.sh scripts/
COPY requirements/trainer-cpu.lock requirements/
COPY deploy/install.sh deploy/
COPY pyproject.toml README.md LICENSE ./
RUN sh deploy/install.sh "$VARIANT" trainer-cpu trainer
COPY trireme trireme
COPY services/__init__.py services/
COPY services/trainer services/trainer
COPY deploy/healthcheck.py deploy/
USER trireme
ENV HF_HUB_OFFLINE=1
EXPOSE 50051 9090
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s CMD ["python3", "-m", "deploy.healthcheck", "50051"]
ENTRYPOINT ["python3", "-m", "services.trainer"]
