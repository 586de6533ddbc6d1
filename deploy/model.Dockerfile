# Runs once, before the others: writes the demo model into the volume that rollout and trainer read.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS build
WORKDIR /build
ENV PIP_NO_CACHE_DIR=1
COPY scripts/install.sh scripts/
COPY requirements/demo.lock requirements/
COPY deploy/install.sh deploy/
RUN sh deploy/install.sh cpu demo demo

FROM ${BASE}
COPY deploy/user.sh /tmp/
RUN sh /tmp/user.sh
COPY --from=build /opt/venv /opt/venv
WORKDIR /app
COPY trireme trireme
USER trireme
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1
ENTRYPOINT ["python", "-m", "trireme"]
CMD ["model", "smollm2", "/models/SmolLM2-135M-Instruct"]
