"""This rank's engine: whole, leading other ranks, following one, or that of one replica among several."""

from msgspec import Struct

from megallm.core_async.actors.worker import Worker, WorkerActor
from megallm.core_async.config import EngineConfig
from megallm.core_async.device.rank_group import Ranks
from megallm.core_async.engine import Engine
from megallm.core_async.errors import RankLostError
from megallm.core_async.protocols import Runner, Tokenizer
from megallm.core_async.ranks.blame import BLAME_S, RankWorker
from megallm.core_async.ranks.calls import Calls, FollowerCalls, LeaderCalls, ReplicaCalls
from megallm.core_async.ranks.coordinator import Coordinator
from megallm.core_async.ranks.direct import DirectFollower, DirectLeader
from megallm.core_async.ranks.follower import Follower
from megallm.core_async.ranks.leader import Leader
from megallm.core_async.ranks.replica import Replica
from megallm.core_async.ranks.together import Together
from megallm.core_async.transport.addresses import address_towards


class Role(Struct, frozen=True, kw_only=True):
    """What one rank is among all that run a model."""

    ranks: Ranks | None = None
    """Those that its replica is split over; None: this one alone."""
    replicas: Ranks | None = None
    """Those that hold the same part of every replica; None: it knows of no other."""
    shares_experts: bool = False
    """The replicas do, so that they take every step together."""
    is_direct: bool = False
    """Every rank's program makes every call, not only the first one's."""
    host: str | None = None
    """Where global rank 0 listens; None is loopback."""
    port: int | None = None


def assembled(config: EngineConfig, runner: Runner, tokenizer: Tokenizer, role: Role) -> tuple[Engine, Calls]:
    """Gives the engine of this rank, and the lifecycle as its program calls it; starts nothing."""
    ranks, replicas = role.ranks, role.replicas
    if ranks is not None and ranks.place:
        follower = (DirectFollower if role.is_direct else Follower)(config, runner, tokenizer, ranks)
        return follower, FollowerCalls(follower)
    led: list[Together] = []
    """Whom this rank leads; those of its own replica join with the engine's start."""

    def make_worker(runner: Runner) -> WorkerActor:
        if ranks is not None:
            leader = _leader(engine, runner, ranks, role)
            led.insert(0, leader)
            return leader
        return Worker(runner) if replicas is None else _replica_worker(engine, runner, replicas, role)

    if replicas is None:
        if ranks is None:
            engine = Engine(config, runner, tokenizer, make_worker=make_worker)
            return engine, Calls(engine)
        if role.is_direct:
            engine = direct = DirectLeader(config, runner, tokenizer, led, make_worker=make_worker)
            return engine, direct.calls
        engine = Engine(config, runner, tokenizer, make_worker=make_worker)
        return engine, LeaderCalls(engine, led)
    if replicas.place:
        engine = replica = Replica(
            config, runner, tokenizer, replicas, make_worker=make_worker, steps_together=role.shares_experts
        )
        return engine, ReplicaCalls(replica, led)
    engine = coordinator = Coordinator(
        config,
        runner,
        tokenizer,
        replicas,
        make_worker=make_worker,
        steps_together=role.shares_experts,
        host=role.host,
        port=role.port,
    )
    led.append(coordinator.replicas)
    return engine, LeaderCalls(engine, led)


def _leader(engine: Engine, runner: Runner, ranks: Ranks, role: Role) -> Leader:
    """Gives the worker of a replica of several ranks; but the first's, it listens where it reaches that."""
    if role.replicas is None:
        return Leader(runner, ranks, engine.error, host=role.host, port=role.port)
    host = role.host if role.host is None or not role.replicas.place else address_towards(role.host)
    return Leader(runner, ranks, engine.error, host=host, blame_s=_blame_s(role))


def _replica_worker(engine: Engine, runner: Runner, replicas: Ranks, role: Role) -> RankWorker:
    """Gives the worker of a replica of one rank."""
    report = engine.report if isinstance(engine, Replica) else _tell_nobody
    worker = RankWorker(runner, replicas.names[replicas.place], report, blame_s=_blame_s(role))
    if not role.shares_experts:
        worker.is_explained.set()  # by itself: no other rank takes part in its steps
    return worker


def _blame_s(role: Role) -> float:
    """Gives how long a failure waits for a better explanation: another replica's comes through a third."""
    return 2 * BLAME_S if role.shares_experts else BLAME_S


def _tell_nobody(_failure: RankLostError) -> None:
    """Is what the coordinator tells of its own worker's failure, before it ends all."""
