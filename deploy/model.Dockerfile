# Runs once, before the others: writes the demo model into the volume that rollout and trainer read.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /app
COPY scripts/install.sh scripts/
COPY requirements/demo.lock requirements/
COPY deploy/install.sh deploy/
RUN sh deploy/install.sh cpu demo demo
COPY trireme trireme
USER trireme
ENTRYPOINT ["python3", "-m", "trireme"]
CMD ["model", "smollm2", "/models/SmolLM2-135M-Instruct"]
