"""The policy of prefix.py as a request router of Ray Serve."""

from __future__ import annotations

from collections import Counter
from typing import Any, Dict, List, Optional

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

# The type of an argument of Ray's, which its public module exports without saying so.
from ray.serve.request_router import ReplicaResult  # type: ignore[attr-defined,unused-ignore]

from .forwarded import Forwarded
from .prefix import ranked


class PrefixRouter(RequestRouter):
    """Sends requests whose prompts begin alike to the same replica, and never one to where it has failed while there
    are others. Loads are those of its own gateway."""

    def initialize_state(self, **_: Any) -> None:
        """Called by Ray Serve instead of a constructor."""
        #: The replica of each running request, by Ray's number of it.
        self._running: Dict[str, ReplicaID] = {}
        self._loads: Counter[str] = Counter()

    async def choose_replicas(
        self, candidate_replicas: List[RunningReplica], pending_request: Optional[PendingRequest] = None
    ) -> List[List[RunningReplica]]:
        """Ranks the replicas: Ray takes the first that has room."""
        found = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        request = _forwarded(pending_request)
        if pending_request is not None:
            # If no replica has room, the request waits before the next attempt.
            pending_request.routing_context.should_backoff = True
        order = ranked(request.key, found, self._loads, request.tried)
        return [[found[name]] for name in order]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: ReplicaResult
    ) -> None:
        """Called when a replica has taken a request."""
        name = replica_id.unique_id
        _forwarded(pending_request).tried.append(name)
        self._running[pending_request.metadata.internal_request_id] = replica_id
        self._loads[name] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called at the end of each attempt, also of those that a replica has not taken."""
        if self._running.get(internal_request_id) != replica_id:
            return
        del self._running[internal_request_id]
        name = replica_id.unique_id
        self._loads[name] -= 1
        if self._loads[name] <= 0:
            del self._loads[name]


def _forwarded(pending_request: Optional[PendingRequest]) -> Forwarded:
    for argument in pending_request.args if pending_request is not None else ():
        if isinstance(argument, Forwarded):
            return argument
    return Forwarded("GET", "/", b"", [], b"")
