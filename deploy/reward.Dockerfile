# The reward service: verifiers, no torch.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE} AS build
WORKDIR /build
ENV PIP_NO_CACHE_DIR=1
COPY scripts/install.sh scripts/
COPY requirements/reward.lock requirements/
COPY deploy/install.sh deploy/
RUN sh deploy/install.sh cpu reward reward

FROM ${BASE}
COPY deploy/user.sh /tmp/
RUN sh /tmp/user.sh
COPY --from=build /opt/venv /opt/venv
WORKDIR /app
COPY trireme trireme
COPY services/__init__.py services/
COPY services/reward services/reward
COPY deploy/healthcheck.py deploy/
USER trireme
ENV PATH=/opt/venv/bin:$PATH PYTHONPATH=/app PYTHONUNBUFFERED=1
EXPOSE 50051 9090
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python", "deploy/healthcheck.py", "50051"]
# Replicas need names of their own in a run: the container's.
ENTRYPOINT ["sh", "-c", "exec python -m services.reward --name \"reward-$HOSTNAME\" \"$@\"", "reward"]
