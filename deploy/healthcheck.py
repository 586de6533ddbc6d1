"""Container health: exit code 0 when the gRPC server of this container (port as argument) says that it serves."""

import sys

from grpc_health.v1 import health_pb2, health_pb2_grpc

from trireme.contracts.grpc import HEALTH_DEADLINE_S, sync_channel

with sync_channel(f"127.0.0.1:{sys.argv[1]}") as channel:
    answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=HEALTH_DEADLINE_S)
sys.exit(answer.status != health_pb2.HealthCheckResponse.SERVING)
