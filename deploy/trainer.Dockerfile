# The trainer. VARIANT cpu: a CPU build of torch; gpu: on a BASE that brings CUDA, torch and Transformer Engine.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS build
ARG VARIANT=cpu
WORKDIR /build
ENV PIP_NO_CACHE_DIR=1
COPY scripts/install.sh scripts/
COPY requirements/trainer-cpu.lock requirements/
COPY deploy/install.sh deploy/
COPY pyproject.toml LICENSE ./
RUN sh deploy/install.sh "$VARIANT" trainer-cpu trainer

FROM ${BASE}
COPY deploy/user.sh /tmp/
RUN sh /tmp/user.sh
COPY --from=build /opt/venv /opt/venv
WORKDIR /app
COPY trireme trireme
COPY services/__init__.py services/
COPY services/trainer services/trainer
COPY deploy/healthcheck.py deploy/
USER trireme
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1 PYTHONHASHSEED=0 HF_HUB_OFFLINE=1
EXPOSE 50051 9090
HEALTHCHECK --interval=10s --timeout=5s --start-period=600s CMD ["python", "deploy/healthcheck.py", "50051"]
ENTRYPOINT ["python", "-m", "services.trainer"]
