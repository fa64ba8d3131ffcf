"""Several replicas of the pool in a test: what they are set to, and what they say of each other."""

from __future__ import annotations

from hearth.pool.v1 import pool_pb2, pool_service_pb2, pool_service_pb2_grpc

# A dead replica is noticed within seconds, and a busy machine is not taken for one.
FAST = {
    "HEARTH_REPLICA_BEAT_EVERY": "0.5",
    "HEARTH_REPLICA_BEAT_FAILING": "0.5",
    "HEARTH_REPLICA_LOOK_EVERY": "0.4",
    "HEARTH_REPLICA_GAP": "2.5",
    "HEARTH_REPLICA_DEAD_AFTER": "4",
}


async def holder_of(pools: pool_service_pb2_grpc.PoolServiceAsyncStub) -> str:
    """The id of the replica that answers."""
    found: str = (await pools.GetPoolStats(pool_service_pb2.GetPoolStatsRequest(), timeout=20)).holder
    return found


async def replicas_by(pools: pool_service_pb2_grpc.PoolServiceAsyncStub) -> dict[str, pool_pb2.Replica]:
    """Every replica that has a row, by its address."""
    request = pool_service_pb2.ListReplicasRequest()
    return {one.address: one for one in (await pools.ListReplicas(request, timeout=20)).replicas}
