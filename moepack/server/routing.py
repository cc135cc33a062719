"""Which replica of `moepack serve --replicas N` gets a request: a router for Ray Serve, which loads it by its name.

Ray's own router sends keys that it does not know to the replica with the fewest known keys. What replicas know reaches
it late, so a burst of new conversations all went to one replica while the others had nothing to do.
"""

from __future__ import annotations

import random

from ray.serve.request_router import FIFOMixin, MultiplexMixin, PendingRequest, RequestRouter, RunningReplica


class ByBeginning(FIFOMixin, MultiplexMixin, RequestRouter):
    """Prefer the replicas that know a request's key; then the less busy of two drawn by chance."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return replicas to try, in order: of each list the one with the shortest queue that is not full."""
        drawn = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        if pending_request is None:
            return [drawn]
        pending_request.routing_context.should_backoff = True
        key = pending_request.metadata.multiplexed_model_id
        return [self.rank_replicas_via_multiplex(candidate_replicas, key)[0], drawn] if key else [drawn]
