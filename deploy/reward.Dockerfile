# The reward service: verifiers, no torch.
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}
ENV PYTHONUNBUFFERED=1 PIP_NO_CACHE_DIR=1 PIP_ROOT_USER_ACTION=ignore
WORKDIR /app
COPY scripts/install.sh scripts/
COPY requirements/reward.lock requirements/
COPY deploy/install.sh deploy/
RUN sh deploy/install.sh cpu reward reward
COPY trireme trireme
COPY services/__init__.py services/
COPY services/reward services/reward
COPY deploy/healthcheck.py deploy/
USER trireme
EXPOSE 50051 9090
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD ["python3", "-m", "deploy.healthcheck", "50051"]
ENTRYPOINT ["python3", "-m", "services.reward"]
