# Redis with persistence and a password from the environment (REDIS_PASSWORD), not as root.
ARG BASE=redis:7-bookworm
FROM ${BASE}
RUN mkdir -p /data && chown redis:redis /data
COPY deploy/redis.conf deploy/redis.sh /etc/trireme/
USER redis
WORKDIR /data
VOLUME /data
EXPOSE 6379
HEALTHCHECK --interval=5s --timeout=3s CMD REDISCLI_AUTH="$REDIS_PASSWORD" redis-cli ping | grep -q PONG
ENTRYPOINT ["sh", "/etc/trireme/redis.sh"]
