"""Failed engines are started anew on all ranks together, and only the failed work is repeated."""

from __future__ import annotations

import os
import warnings

import pytest
import torch
import torch.distributed as dist

from app.engine.errors import EngineError, EngineFailure
from app.engine.recovery import EngineRecovery
from app.types import Request, SamplingConfig
from app.world import World
from tests.conftest import FakeEngine
from tests.ranks import free_port, on_ranks
from tests.threads import on_two_threads

REQUESTS = [Request(token_ids=(5,), seed=seed) for seed in range(4)]
SAMPLING = SamplingConfig(max_tokens=6)


class BrokenEngine(FakeEngine):
    """Raises the given errors in its next calls, one each; counts starts."""

    def __init__(self, *faults: Exception | None) -> None:
        super().__init__()
        self.faults = list(faults)
        self.starts = 0
        self.start("model", 7)

    def start(self, model_path, seed):
        self._origin = (model_path, seed)
        self.starts += 1

    def generate(self, requests, sampling):
        if self.policy_version < 0:
            raise ValueError("asked before the weights were sent")
        fault = self.faults.pop(0) if self.faults else None
        if fault is not None:
            raise fault
        return super().generate(requests, sampling)


class Sender:
    """Sends the weights of step 5; raises the given errors first, on all ranks, one in each call."""

    def __init__(self, engine: FakeEngine, world: World, *faults: Exception) -> None:
        self.engine = engine
        self.world = world
        self.faults = list(faults)
        self.sent = 0

    def send(self) -> None:
        self.world.gather("weights")  # collective, as under ZeRO-3
        self.sent += 1
        if self.faults:
            raise self.faults.pop(0)
        self.engine.load_weights([], 5)


def expected() -> list:
    return FakeEngine().generate(REQUESTS, SAMPLING)


def recovery(engine: FakeEngine, world: World, max_restarts: int = 3) -> EngineRecovery:
    made = EngineRecovery(engine, world, max_restarts)
    made.connect(Sender(engine, world))
    return made


def generate(made: EngineRecovery) -> list:
    return made.run(lambda: made.engine.generate(REQUESTS, SAMPLING))


def test_alone_a_failed_engine_is_restarted_synced_and_asked_again():
    engine = BrokenEngine(EngineFailure("hung"))
    made = recovery(engine, World())
    with pytest.warns(UserWarning, match=r"rank 0: hung; restart 1 of 3 in a row"):
        assert generate(made) == expected()
    assert (engine.starts, engine.policy_version, made.restarts) == (2, 5, 1)


def test_work_that_succeeds_at_once_ends_the_row_of_restarts():
    engine = BrokenEngine(EngineFailure("a"), None, None, EngineFailure("b"), EngineFailure("c"), EngineFailure("d"))
    made = recovery(engine, World(), max_restarts=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        generate(made)
        generate(made)
        assert made.restarts == 0
        with pytest.raises(EngineError, match=r"after 2 restarts in a row \(data\.max_engine_restarts\): rank 0: d"):
            generate(made)


@pytest.mark.filterwarnings("ignore:rank")
def test_failures_in_consecutive_rollouts_are_a_row_too():
    engine = BrokenEngine(*[EngineFailure("again"), None] * 3)
    made = recovery(engine, World(), max_restarts=2)
    assert generate(made) == generate(made) == expected()
    with pytest.raises(EngineError, match="after 2 restarts in a row"):
        generate(made)


def test_none_allowed_means_none():
    engine = BrokenEngine(EngineFailure("hung"))
    with pytest.raises(EngineError, match="after 0 restarts in a row"):
        generate(recovery(engine, World(), max_restarts=0))
    assert engine.starts == 1
    with pytest.raises(ValueError, match=r"data\.max_engine_restarts=-1: must be 0 or more"):
        EngineRecovery(engine, World(), -1)


@pytest.mark.parametrize("error", [ValueError("prompt too long"), EngineError("quantised")])
def test_what_no_restart_can_mend_passes_unchanged(error):
    engine = BrokenEngine(error)
    with pytest.raises(type(error), match=str(error)):
        generate(recovery(engine, World()))
    assert engine.starts == 1


def test_without_weights_to_send_there_is_no_restart():
    engine = BrokenEngine(EngineFailure("hung"))
    with pytest.raises(EngineError, match="nothing sends it the weights for a new start: rank 0: hung"):
        generate(EngineRecovery(engine, World()))


@pytest.mark.filterwarnings("ignore:rank")
def test_of_two_ranks_both_restart_and_only_the_failed_one_works_again():
    engines = [BrokenEngine(), BrokenEngine(EngineFailure("hung"), EngineFailure("hung"))]
    outcomes = on_two_threads(lambda world: generate(recovery(engines[world.rank], world)))
    assert outcomes == [expected(), expected()]
    assert [engine.starts for engine in engines] == [3, 3]
    assert [len(engine.asked) for engine in engines] == [1, 1]
    assert [engine.policy_version for engine in engines] == [5, 5]


@pytest.mark.filterwarnings("ignore:rank")
def test_the_limit_ends_both_ranks_with_one_line():
    engines = [BrokenEngine(), BrokenEngine(*[EngineFailure("hung")] * 9)]
    for outcome in on_two_threads(lambda world: generate(recovery(engines[world.rank], world))):
        assert isinstance(outcome, EngineError)
        assert str(outcome) == "an engine failed after 3 restarts in a row (data.max_engine_restarts): rank 1: hung"


def test_one_ranks_other_error_ends_both():
    engines = [BrokenEngine(EngineFailure("hung")), BrokenEngine(ValueError("row 3 is too long"))]
    failed, raised = on_two_threads(lambda world: generate(recovery(engines[world.rank], world)))
    assert isinstance(failed, EngineError)
    assert str(failed) == "rank 1 failed: ValueError: row 3 is too long"
    assert isinstance(raised, ValueError)


@pytest.mark.filterwarnings("ignore:rank")
def test_an_engine_that_does_not_start_again_ends_both():
    class Gone(BrokenEngine):
        def start(self, model_path, seed):
            super().start(model_path, seed)
            if self.starts > 1:
                raise EngineError("no GPU left")

    engines = [BrokenEngine(), Gone(EngineFailure("hung"))]
    other, own = on_two_threads(lambda world: generate(recovery(engines[world.rank], world)))
    assert (str(other), str(own)) == ("rank 1 failed: EngineError: no GPU left", "no GPU left")


@pytest.mark.filterwarnings("ignore:rank", "ignore:died")
def test_an_engine_that_fails_while_it_is_sent_the_weights_is_restarted_too():
    engine = BrokenEngine(EngineFailure("hung"))
    made = EngineRecovery(engine, World())
    sender = Sender(engine, World(), EngineFailure("died while loading"))
    made.connect(sender)
    assert generate(made) == expected()
    assert (engine.starts, sender.sent, made.restarts) == (3, 2, 2)


@pytest.mark.filterwarnings("ignore:died")
def test_sending_is_repeated_until_it_succeeds_and_counts_towards_the_row():
    engine = BrokenEngine()
    made = EngineRecovery(engine, World(), max_restarts=2)
    sender = Sender(engine, World(), *[EngineFailure("died while loading")] * 5)
    with pytest.raises(EngineError, match=r"after 2 restarts in a row .*: died while loading"):
        made.repeat(sender.send)
    assert (engine.starts, sender.sent) == (3, 3)
    with pytest.raises(ValueError, match="no shape"):
        made.repeat(Sender(engine, World(), ValueError("no shape")).send)


def test_restart_needs_a_start_and_forgets_the_version():
    engine = FakeEngine()
    with pytest.raises(EngineError, match="nothing to restart"):
        engine.restart()
    broken = BrokenEngine()
    broken.load_weights([], 9)
    broken.restart()
    assert (broken._origin, broken.policy_version) == (("model", 7), -1)


def _worker(rank: int, port: int, folder: str) -> None:
    warnings.simplefilter("ignore")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=2)
    engine = BrokenEngine(*([None, EngineFailure("hung")] if rank == 1 else []))
    made = recovery(engine, World())
    first, second = generate(made), generate(made)
    assert first == second == expected()
    engine.faults = [ValueError("too long")] if rank == 0 else []
    with pytest.raises(ValueError if rank == 0 else EngineError, match="too long"):
        generate(made)
    torch.save((engine.starts, len(engine.asked), engine.policy_version), f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_recover_together(tmp_path):
    on_ranks(_worker, free_port(), str(tmp_path))
    # rank 1's second rollout failed once; in the third rank 1 worked while rank 0 raised
    assert torch.load(tmp_path / "0.pt") == (2, 2, 5)
    assert torch.load(tmp_path / "1.pt") == (2, 3, 5)
