"""A Ray cluster in this process: actors run when their results are asked for, and workers and nodes die on demand."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any


class ActorDied(Exception):
    """What a dead actor's results raise."""


class TaskFailed(Exception):
    """What a failed call's result raises; `cause` is the actor's own error."""

    def __init__(self, cause: Exception):
        super().__init__(str(cause))
        self.cause = cause


class Ref:
    """The result of a call, which is made when it is asked for."""

    def __init__(self, actor: Actor, name: str, args: Sequence[Any]):
        self.actor, self.name, self.args = actor, name, args


class Actor:
    """An actor on a node; it dies when its node does, when it is killed, or as `dies` says."""

    def __init__(self, cluster: FakeRay, node: str, needs: dict[str, Any], instance: Any):
        self.cluster, self.node, self.needs, self.instance, self.is_dead = cluster, node, needs, instance, False

    def __getattr__(self, name: str) -> Any:
        return types.SimpleNamespace(remote=lambda *args: Ref(self, name, args))


class FakeRay:
    """As much of Ray's module as `RayWorkers` uses.

    Args:
      nodes: resources by node.
      dies: whether the actor dies during a call, asked with the actor, the method's name and its arguments.
      choose: which of the waiting calls ends next, an index below their number.
      hangs: whether an actor's call never ends, asked with the actor and the method's name.
    """

    def __init__(
        self,
        nodes: dict[str, dict[str, float]],
        dies: Callable[[Actor, str, Sequence[Any]], bool] = lambda *_: False,
        choose: Callable[[int], int] = lambda number: 0,
        hangs: Callable[[Actor, str], bool] = lambda *_: False,
    ):
        self.resources, self.dies, self.choose, self.hangs = nodes, dies, choose, hangs
        self.actors: list[Actor] = []  # all that ever were
        self.most_alive: dict[str, int] = {}  # actors at one time, by node
        other = type("Other", (Exception,), {})
        names = ("ActorUnschedulableError", "ObjectLostError", "NodeDiedError", "WorkerCrashedError")
        errors = dict.fromkeys((*names, "OutOfMemoryError"), other)
        self.exceptions = types.SimpleNamespace(RayActorError=ActorDied, RayTaskError=TaskFailed, **errors)

    def nodes(self) -> list[dict[str, Any]]:
        # Ray's ids have 56 hexadecimal digits, which its scheduling strategies check.
        ids = {name: name.encode().hex().ljust(56, "0") for name in self.resources}
        return [{"NodeID": ids[name], "Alive": True, "Resources": r} for name, r in self.resources.items()]

    def remote(self, cls: type) -> Any:
        def options(*, scheduling_strategy, max_restarts, max_task_retries, **needs):
            assert max_restarts == max_task_retries == 0  # what dies is tried again by the driver alone
            node = bytes.fromhex(scheduling_strategy.node_id).rstrip(b"\0").decode()
            return types.SimpleNamespace(remote=lambda *args: make(node, needs, args))

        def make(node: str, needs: dict[str, Any], args: Sequence[Any]) -> Actor:
            self.actors.append(actor := Actor(self, node, needs, cls(*args)))
            alive = sum(a.node == node and not a.is_dead for a in self.actors)
            self.most_alive[node] = max(self.most_alive.get(node, 0), alive)
            return actor

        return types.SimpleNamespace(options=options)

    def wait(self, refs: list[Ref], num_returns: int, timeout: float) -> tuple[list[Ref], list[Ref]]:
        assert refs, "nothing is awaited, so that the run would hang"
        ending = [ref for ref in refs if not self.hangs(ref.actor, ref.name)]
        if not ending:
            return [], refs
        ready = ending[self.choose(len(ending))]
        return [ready], [ref for ref in refs if ref is not ready]

    def get(self, ref: Ref) -> Any:
        actor = ref.actor
        if actor.is_dead or actor.node not in self.resources or self.dies(actor, ref.name, ref.args):
            actor.is_dead = True
            raise ActorDied("The actor died unexpectedly before finishing this task.")
        try:
            return getattr(actor.instance, ref.name)(*ref.args)
        except Exception as e:
            raise TaskFailed(e) from e

    def kill(self, actor: Actor, no_restart: bool) -> None:
        actor.is_dead = True
