"""This rank's engine: whole, leading other ranks, following one, or that of one replica among several."""

from megallm.core_async.actors.worker import Worker, WorkerActor
from megallm.core_async.config import EngineConfig
from megallm.core_async.device.rank_group import Ranks
from megallm.core_async.engine import Engine
from megallm.core_async.errors import RankLostError
from megallm.core_async.protocols import Runner, Tokenizer
from megallm.core_async.ranks.blame import BLAME_S, RankWorker
from megallm.core_async.ranks.calls import Calls, FollowerCalls, LeaderCalls, ReplicaCalls
from megallm.core_async.ranks.coordinator import Coordinator
from megallm.core_async.ranks.follower import Follower
from megallm.core_async.ranks.leader import Leader
from megallm.core_async.ranks.replica import Replica
from megallm.core_async.ranks.together import Together
from megallm.core_async.transport.ranks import address_towards


def assembled(
    config: EngineConfig,
    runner: Runner,
    tokenizer: Tokenizer,
    *,
    ranks: Ranks | None,
    replicas: Ranks | None,
    shares_experts: bool = False,
    host: str | None = None,
    port: int | None = None,
) -> tuple[Engine, Calls]:
    """Gives the engine of this rank, and the lifecycle as its program calls it; starts nothing.

    `ranks`: that the model is split over; `replicas`: that hold the same part of the others; None: this one
    alone. `host`, `port`: where global rank 0 listens.
    """
    if ranks is not None and ranks.place:
        follower = Follower(config, runner, tokenizer, ranks)
        return follower, FollowerCalls(follower)
    led: list[Together] = []
    """Whom this rank leads; those of its own replica join with the engine's start."""

    # a replica's failure that others share comes to be known through the coordinator
    blame_s = 2 * BLAME_S if shares_experts else BLAME_S

    def make_worker(runner: Runner) -> WorkerActor:
        if ranks is None and replicas is None:
            return Worker(runner)
        if ranks is None:
            assert replicas is not None
            name = replicas.names[replicas.place]
            report = engine.report if isinstance(engine, Replica) else _tell_nobody
            worker = RankWorker(runner, name, report, blame_s=blame_s)
            if not shares_experts:
                worker.is_explained.set()  # by itself: no other rank takes part in its steps
            return worker
        if replicas is None:
            leader = Leader(runner, ranks, engine.error, host=host, port=port)
        else:
            own_host = host if host is None or not replicas.place else address_towards(host)
            leader = Leader(runner, ranks, engine.error, host=own_host, blame_s=blame_s)
        led.insert(0, leader)
        return leader

    if replicas is None:
        engine = Engine(config, runner, tokenizer, make_worker=make_worker)
        return engine, Calls(engine) if ranks is None else LeaderCalls(engine, led)
    if replicas.place:
        engine = replica = Replica(
            config, runner, tokenizer, replicas, make_worker=make_worker, steps_together=shares_experts
        )
        return engine, ReplicaCalls(replica, led)
    engine = coordinator = Coordinator(
        config,
        runner,
        tokenizer,
        replicas,
        make_worker=make_worker,
        steps_together=shares_experts,
        host=host,
        port=port,
    )
    led.append(coordinator.replicas)
    return engine, LeaderCalls(engine, led)


def _tell_nobody(_failure: RankLostError) -> None:
    """Is what the coordinator tells of its own worker's failure, before it ends all."""
