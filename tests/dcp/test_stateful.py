"""Objects with ``state_dict`` and ``load_state_dict`` in a state that is saved and restored."""

from __future__ import annotations

import dataclasses
import functools
import logging

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing._internal.two_tensor import TwoTensor

import statetree
from statetree.dcp import Checkpointer
from statetree.testing import run_ranks
from tests.judge import assert_trees_equal


class Loader:
    """Its state has other keys from one moment to the next, as a data loader's has."""

    def __init__(self):
        self.position = 0

    def state_dict(self):
        return {"position": self.position, "inside": {"at": torch.tensor(self.position)}} if self.position else {}

    def load_state_dict(self, state):
        self.position = state["position"]
        assert state["inside"]["at"] == self.position


@dataclasses.dataclass
class AppState:
    """What DCP's recipe shows: an object of one's own, here one that would be a container as well."""

    value: torch.Tensor

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, state):
        self.value = state["value"] + 0


def training(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)
    return {"model": model, "optim": [optimizer, scheduler], "loader": Loader(), "step": 0}


def train(run, steps):
    for _ in range(steps):
        run["step"] += 1
        run["loader"].position += 1
        generator = torch.Generator().manual_seed(run["step"])
        run["model"](torch.randn(8, 3, generator=generator)).square().sum().backward()
        for each in run["optim"]:
            each.step()
        run["optim"][0].zero_grad()


def states(run):
    return run["model"].state_dict(), [each.state_dict() for each in run["optim"]], run["loader"].state_dict()


@pytest.mark.parametrize("call", ["save", "async_save"])
def test_a_run_is_saved_and_resumed_by_its_objects(call, tmp_path):
    run = training(0)
    train(run, 3)
    with Checkpointer(tmp_path) as saved:
        getattr(saved, call)(3, run)
        train(run, 2)
        resumed = training(1)
        objects = dict(resumed)
        resumed = saved.restore(resumed)
    assert all(resumed[key] is objects[key] for key in ("model", "loader"))
    assert resumed["optim"][0] is objects["optim"][0]
    assert resumed["step"] == 3
    train(resumed, 2)
    assert_trees_equal(states(resumed), states(run))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_plain_dcp_reads_are_the_states(tmp_path):
    run = training(0)
    train(run, 1)
    with Checkpointer(tmp_path) as saved:
        saved.save(1, run)
        assert_trees_equal(saved.restore()["model"], run["model"].state_dict())
        weights = {"model": {"0.weight": torch.zeros(4, 3)}}
        torch.distributed.checkpoint.load(weights, checkpoint_id=saved.path(), no_dist=True)
    assert torch.equal(weights["model"]["0.weight"], run["model"][0].weight)


def test_a_state_may_be_an_object(tmp_path):
    own = AppState(torch.arange(3.0))
    with Checkpointer(tmp_path) as saved:
        saved.save(1, own)
        fresh = AppState(torch.zeros(3))
        assert saved.restore(fresh) is fresh
        assert fresh.value.tolist() == [0, 1, 2]
        assert saved.restore(fresh, where="value") is fresh


@pytest.mark.parametrize("own", [[], [0.0], [0.0] * 4, None])
@pytest.mark.parametrize("beside", [{}, {"model": nn.Linear(1, 1)}, {"first": [AppState(torch.ones(1)), ()]}])
def test_plain_values_beside_objects_are_what_was_saved(beside, own, tmp_path):
    with Checkpointer(tmp_path) as saved:
        saved.save(1, {**beside, "losses": [1.0, 2.0], "empty": ()})
        restored = saved.restore({**beside, "losses": own, "empty": ()})
    assert restored == {**beside, "losses": [1.0, 2.0], "empty": ()}


def test_an_object_may_lie_nine_hundred_levels_deep(tmp_path):
    def nested(own):
        return functools.reduce(lambda inner, _: [inner], range(900), own)

    own, fresh = AppState(torch.arange(3.0)), AppState(torch.zeros(3))
    with Checkpointer(tmp_path) as saved:
        saved.save(1, nested(own))
        found = saved.restore(nested(fresh))
    for _ in range(900):
        (found,) = found
    assert found is fresh
    assert fresh.value.tolist() == [0, 1, 2]


class Fresh:
    """A container that hands out other children each time."""

    def __init__(self, *items):
        self.items = items


statetree.register_container(
    Fresh,
    lambda own: ([dict(each) if type(each) is dict else each for each in own.items], None),
    lambda _, children: Fresh(*children),
)


def test_objects_get_into_their_places_whatever_their_container_hands_out(tmp_path):
    state = {"pair": Fresh(AppState(torch.ones(2)), {"k": [1]})}
    with Checkpointer(tmp_path) as saved:
        saved.save(1, state)
        assert saved.restore(state)["pair"].items == state["pair"].items


def test_where_gives_an_object_the_paths_that_its_state_has(tmp_path):
    run = training(0)
    train(run, 2)
    with Checkpointer(tmp_path) as saved:
        saved.save(1, run)
        other = training(1)
        weight = other["model"][1].weight.detach().clone()
        saved.restore({"model": other["model"]}, where="model.0.*")
    assert torch.equal(other["model"][0].weight, run["model"][0].weight)
    assert torch.equal(other["model"][1].weight, weight)


def test_an_object_that_does_not_fit_is_named(tmp_path):
    with Checkpointer(tmp_path) as saved:
        saved.save(1, {"model": nn.Linear(2, 3)})
        with pytest.raises(statetree.TreeMismatch, match=r"shape differs at model\.weight"):
            saved.restore({"model": nn.Linear(2, 4)})
        with pytest.raises(statetree.TreeMismatch, match=r"other"):
            saved.restore({"other": nn.Linear(2, 3)})


def test_an_object_that_was_not_saved_is_named(tmp_path):
    with Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(1, {"model": nn.Linear(2, 3), "step": 1})
        with pytest.raises(
            statetree.TreeMismatch, match=r"(?s)load: .*missing at ema\.weight.*With strict=False"
        ) as error:
            checkpointer.restore({"model": nn.Linear(2, 3), "ema": nn.Linear(2, 3), "step": 0})
    assert [str(found.path) for found in error.value.differences] == ["ema.weight", "ema.bias"]


def restored_in_part(directory):
    """Return what the log says when a template has all, lacks the optimizer, or says which part it is."""
    rank, model = dist.get_rank(), nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("statetree").addHandler(handler)
    found = []
    with Checkpointer(directory) as checkpointer:
        rest = {"model": model, f"seed_{rank}": rank}
        checkpointer.save(1, {**rest, "optimizer": optimizer, "\x1b[2J": 0})
        for template, options in (
            ({**rest, "optimizer": optimizer, "\x1b[2J": 0}, {}),
            (rest, {}),
            (rest, {"where": "model.**"}),
            (rest, {"strict": False}),
        ):
            said.clear()
            checkpointer.restore(template, **options)
            found.append([text for text in said if "lacks" in text])
    return found


def test_what_no_template_has_is_logged(tmp_path):
    first, second = run_ranks(2, restored_in_part, tmp_path)
    (text,) = first.pop(1)
    assert text.startswith(
        "restore: step 1 has what the template lacks: \\x1b[2J, optimizer.param_groups.0.dampening, "
    )
    assert text.endswith(" more. It is left.")
    assert first == [[], [], []]
    assert second == [[], [], [], []]


def test_what_state_dict_raises_is_raised_and_nothing_is_saved(tmp_path):
    class Broken(AppState):
        def state_dict(self):
            raise ZeroDivisionError

    broken = Broken(torch.zeros(1))
    with Checkpointer(tmp_path) as saved:
        for save in (saved.save, saved.async_save):
            with pytest.raises(ZeroDivisionError):
                save(1, [broken])
        saved.save(2, [AppState(torch.zeros(1))])
        with pytest.raises(ZeroDivisionError):
            saved.restore([broken])
        assert saved.steps() == [2]


class Sharded(nn.Module):
    def __init__(self):
        super().__init__()
        mesh = init_device_mesh("cpu", (2,))
        self.weight = nn.Parameter(distribute_tensor(torch.arange(10.0), mesh, [Shard(0)]))


def on_two_ranks(directory):
    model = Sharded()
    whole = model.weight.full_tensor().detach().clone()
    with Checkpointer(directory) as saved:
        saved.save(1, {"model": model})
        with torch.no_grad():
            model.weight.zero_()
        saved.restore({"model": model})
    assert isinstance(model.weight, DTensor)
    assert torch.equal(model.weight.full_tensor(), whole)


def test_a_sharded_model_is_filled_in_its_layout(tmp_path):
    run_ranks(2, on_two_ranks, tmp_path)


def resumed_optimizer(directory, world_size):
    """Resume, where there is something, with an optimizer that has not stepped yet; return the weights."""
    torch.manual_seed(0)
    model = nn.Linear(3, 5)
    fully_shard(model, mesh=init_device_mesh("cpu", (world_size,)))
    run = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1), "step": 0}
    with Checkpointer(directory) as saved:
        run = saved.restore(run) if saved.steps() else run
        for step in range(run["step"] + 1, run["step"] + 3):
            model(torch.full((2, 3), float(step))).square().sum().backward()
            run["optimizer"].step()
            run["optimizer"].zero_grad()
            saved.save(step, {**run, "step": step})
    return model.weight.full_tensor().detach().clone()


def test_a_fresh_optimizer_is_filled_in_the_layout_of_its_parameters(tmp_path):
    for directory, worlds in (("same", (2, 2)), ("fewer", (2, 1)), ("more", (1, 2))):
        *_, last = [run_ranks(world, resumed_optimizer, tmp_path / directory, world)[0] for world in worlds]
        torch.testing.assert_close(last, whole_run())


def whole_run():
    torch.manual_seed(0)
    model = nn.Linear(3, 5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(1, 5):
        model(torch.full((2, 3), float(step))).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach()


class Holding:
    """Its state holds a tensor that is made of two."""

    def __init__(self, *parts):
        self.state = {"w": TwoTensor(*parts), "n": 1} if parts else {}

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


def test_an_object_gets_tensors_that_are_made_of_several_as_such(tmp_path):
    saved = Holding(torch.arange(3.0), torch.ones(3))
    with Checkpointer(tmp_path) as checkpointer:
        with pytest.warns(UserWarning, match=r"held\.w: a leaf TwoTensor"):  # it takes a template
            checkpointer.save(1, {"held": saved, "x": torch.ones(2)})
        other = Holding(torch.zeros(3), torch.zeros(3))
        del other.state["n"]  # what it lacks is made
        checkpointer.restore({"held": other, "x": torch.zeros(2)})
        assert_trees_equal(other.state, saved.state)
        with pytest.raises(statetree.TreeMismatch, match=r"structure differs at held\.w"):
            checkpointer.restore({"held": Holding(), "x": torch.zeros(2)})


class Queue:
    """An object whose state is whatever it was given."""

    def __init__(self, state):
        self.state = state

    def state_dict(self):
        return self.state

    def load_state_dict(self, state):
        self.state = state


@pytest.mark.parametrize("state", [{"a": []}, {"a": {}}, {"a": {}, "b": ()}, {"a": {"b": []}}, {"a": [], "n": 1}])
@pytest.mark.parametrize("fresh", [{}, {"n": 0}])
def test_empty_containers_come_into_a_fresh_object(state, fresh, tmp_path):
    if fresh and "n" not in state:
        state = {**state, "n": 2}
    with Checkpointer(tmp_path) as saved:
        saved.save(1, {"queue": Queue(state)})
        restored = saved.restore({"queue": Queue(fresh)})
    assert restored["queue"].state == state


def scheduled(steps):
    """A run whose schedulers hold the optimizer's tensor, each what it was when it ended."""
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01), foreach=False)
    kinds = torch.optim.lr_scheduler
    parts = [kinds.LinearLR(optimizer, total_iters=3), kinds.CosineAnnealingLR(optimizer, 20)]
    run = {"model": model, "optim": optimizer, "scheduler": kinds.SequentialLR(optimizer, parts, [3])}
    for _ in range(steps):
        step_of(run)
    return run


def step_of(run):
    run["model"](torch.ones(4, 3)).square().mean().backward()
    run["optim"].step()
    run["optim"].zero_grad()
    run["scheduler"].step()


@pytest.mark.parametrize("steps", [0, 2, 6])
def test_schedulers_of_a_tensor_are_restored(steps, tmp_path):
    run = scheduled(4)
    with Checkpointer(tmp_path) as saved:
        saved.save(4, run)
        resumed = saved.restore(scheduled(steps))
        saved.restore({"scheduler": scheduled(steps)["scheduler"]}, where="**")
    for key in run:
        report = statetree.similarity(resumed[key].state_dict(), run[key].state_dict())  # DCP keeps no ties
        assert report, report
    for each in (run, resumed):
        step_of(each)
    assert torch.equal(resumed["model"].weight, run["model"].weight)


class Failing(Loader):
    def __init__(self, method):
        super().__init__()
        self.method = method

    def state_dict(self):
        if self.method == "state_dict":
            raise KeyError("shuffle")
        return super().state_dict()

    def load_state_dict(self, state):
        if self.method == "load_state_dict" and (not dist.is_initialized() or dist.get_rank() == 1):
            raise KeyError("shuffle")


@pytest.mark.parametrize("call", ["save", "async_save", "restore"])
def test_what_an_object_raises_has_its_path(call, tmp_path):
    method = "load_state_dict" if call == "restore" else "state_dict"
    with Checkpointer(tmp_path) as saved:
        saved.save(1, {"data": {"train": Loader()}})
        given = {"data": {"train": Failing(method)}}
        with pytest.raises(KeyError, match="shuffle") as caught:
            saved.restore(given) if call == "restore" else getattr(saved, call)(2, given)
        assert caught.value.__notes__ == [f"statetree: {call}: in {method} of the object at data.train"]
        assert saved.steps() == [1]


def fail_to_load_on_one(directory):
    with Checkpointer(directory) as saved:
        saved.save(1, {"loader": Loader(), "w": torch.ones(3)})
        with pytest.raises(KeyError if dist.get_rank() else statetree.CheckpointError, match="shuffle"):
            saved.restore({"loader": Failing("load_state_dict"), "w": torch.zeros(3)})
        assert saved.restore({"w": torch.zeros(3)})["w"].tolist() == [1, 1, 1]  # the ranks are in step


def test_an_object_that_fails_on_one_rank_does_on_all(tmp_path):
    run_ranks(2, fail_to_load_on_one, tmp_path)


@pytest.mark.parametrize("where", ["**", ["model.**", "optim.**"], lambda path, _: path[0] != "extra"])
def test_where_chooses_of_what_an_optimizer_lacks(where, tmp_path):
    run = scheduled(4)
    with Checkpointer(tmp_path) as saved:
        saved.save(4, {**run, "extra": 1})
        fresh = scheduled(0)
        restored = saved.restore({**fresh, "extra": 0}, where=where)
        assert restored["extra"] == (where == "**")
    for key in ("model", "optim"):
        report = statetree.similarity(fresh[key].state_dict(), run[key].state_dict())
        assert report, report


@pytest.mark.parametrize(
    "where", ["model.**", "extra", lambda path, _: path[0] == "model", ["model.**", "optim.param_**"]]
)
def test_what_where_does_not_choose_of_an_object_stays_as_it_is(where, tmp_path):
    run, fresh = scheduled(4), scheduled(0)
    before = statetree.offload(fresh["optim"].state_dict())
    with Checkpointer(tmp_path) as saved:
        saved.save(4, {**run, "extra": torch.ones(2)})
        saved.restore({**fresh, "extra": torch.zeros(2)}, where=where)
    if "optim" not in str(where):
        assert_trees_equal(statetree.offload(fresh["optim"].state_dict()), before)
    assert fresh["optim"].state_dict()["state"] == {}
    assert torch.equal(fresh["model"].weight, run["model"].weight) == (where != "extra")


class Held:
    """It has what it is given, and takes what was saved."""

    def __init__(self, **held):
        self.held = held

    def state_dict(self):
        return dict(self.held)

    def load_state_dict(self, state):
        self.held = state


@pytest.mark.parametrize(
    ("stored", "own"),
    [(None, {"at": 5}), ({"at": 5}, None), ([torch.ones(2)], []), ([], [torch.ones(2)]), ({}, {"a": {}})],
    ids=str,
)
def test_a_live_state_that_where_does_not_touch_stays(stored, own, tmp_path):
    with Checkpointer(tmp_path) as saved:
        saved.save(1, {"held": Held(some=stored, n=torch.ones(2), more=torch.ones(2)), "m": {"w": torch.ones(2)}})
        held, m = Held(some=own, n=torch.zeros(2)), {"w": torch.zeros(2)}
        saved.restore({"held": held, "m": m}, where="m.**")
    assert_trees_equal(held.held, {"some": own, "n": torch.zeros(2)})
    assert m["w"].tolist() == [1, 1]


@pytest.mark.parametrize("where", ["held.xs.2", lambda path, _: str(path) in ("held.xs.2", "m.w"), "held.xs.0*"])
def test_a_part_of_what_an_object_lacks_is_refused(where, tmp_path):
    with Checkpointer(tmp_path) as saved:
        saved.save(1, {"held": Held(xs=[torch.full((2,), float(n)) for n in range(12)]), "m": {"w": torch.ones(2)}})
        held = Held(xs=[torch.zeros(2)])
        if where == "held.xs.0*":  # it has that one
            saved.restore({"held": held}, where=where)
            return
        with pytest.raises(statetree.TreeMismatch, match="where chooses some of what the object at held lacks"):
            saved.restore({"held": held, "m": {"w": torch.zeros(2)}}, where=where)
        saved.restore({"held": held}, where="held.**")
    assert [x.tolist() for x in held.held["xs"]] == [[n, n] for n in range(12)]


def embedded(steps):
    torch.manual_seed(0)
    model = nn.Embedding(10, 4, sparse=True)
    run = {"model": model, "optim": torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)}
    for _ in range(steps):
        model(torch.tensor([1, 3, 3])).square().sum().backward()
        run["optim"].step()
        run["optim"].zero_grad()
    return run


def test_sparse_moments_come_into_a_fresh_optimizer(tmp_path):
    run = embedded(2)
    with Checkpointer(tmp_path) as saved:
        saved.save(2, run)
        resumed = saved.restore(embedded(0))
    report = statetree.similarity(resumed["optim"].state_dict(), run["optim"].state_dict())
    assert report, report


FAMILIES = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True),
    "SGD": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    "LBFGS": lambda model: torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3),
    "strong Wolfe": lambda model: torch.optim.LBFGS(model.parameters(), max_iter=3, line_search_fn="strong_wolfe"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_an_optimizer_that_has_gone_on_goes_back(family, tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    run = {"model": model, "optimizer": FAMILIES[family](model)}

    def train(*trained):
        for number, layer in enumerate(model):
            layer.requires_grad_(number in trained)

        def loss():
            run["optimizer"].zero_grad()
            found = model(torch.ones(2, 3)).square().sum()
            found.backward()
            return found

        run["optimizer"].step(loss)

    wants = []
    with Checkpointer(tmp_path) as saved:
        for step, trained in enumerate([(), (1,), (0, 1), (0, 1)]):  # frozen at first
            if trained:
                train(*trained)
            saved.save(step, run)
            wants.append(saved.restore(step=step))
        for step in (2, 0, 3, 1, 0, 2):
            saved.restore(run, step=step)
            assert statetree.similarity({name: own.state_dict() for name, own in run.items()}, wants[step])
            train(0, 1)


def test_what_else_an_optimizer_has_is_missed(tmp_path):
    """Names of parameters are not their numbers, and what is no moment is no matter of steps."""
    weight = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    weight.grad = torch.ones(2)
    optimizer.step()
    with Checkpointer(tmp_path) as saved:
        named = optimizer.state_dict()
        named["state"] = {"weight": named["state"][0]}
        saved.save(1, {"optimizer": named})
        with pytest.raises(statetree.TreeMismatch, match=r"optimizer\.state\.0\.momentum_buffer"):
            saved.restore({"optimizer": optimizer}, step=1)
        saved.save(2, {"optimizer": optimizer})
        optimizer.param_groups[0]["more"] = 3
        with pytest.raises(statetree.TreeMismatch, match=r"optimizer\.param_groups\.0\.more"):
            saved.restore({"optimizer": optimizer}, step=2)


def stepped(family):
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    for weight in weights:
        weight.grad = torch.ones(2)
    optimizer = family(weights, lr=0.1)
    optimizer.step()
    return optimizer


def test_another_optimizers_state_is_refused(tmp_path):
    """A field that is kept of others is not one that came later: without it the next step fails."""
    with Checkpointer(tmp_path) as saved:
        saved.save(1, {"optimizer": stepped(torch.optim.Adam)})
        with pytest.raises(statetree.TreeMismatch, match=r"optimizer\.state\.0\.exp_inf"):
            saved.restore({"optimizer": stepped(torch.optim.Adamax)}, step=1)
        saved.save(2, {"optimizer": {"param_groups": stepped(torch.optim.Adam).state_dict()["param_groups"]}})
        with pytest.raises(statetree.TreeMismatch, match=r"optimizer\.state\.0\."):
            saved.restore({"optimizer": stepped(torch.optim.Adam)}, step=2)
        optimizer = stepped(torch.optim.Adam)
        optimizer.state["more"] = {"count": 3}
        with pytest.raises(statetree.TreeMismatch, match=r"optimizer\.state\.more\.count"):
            saved.restore({"optimizer": optimizer}, step=1)


def test_what_an_optimizer_has_beside_stays_without_strict_and_where_it_is_not_chosen(tmp_path):
    fresh = torch.optim.Adam(stepped(torch.optim.SGD).param_groups[0]["params"], lr=0.1)  # of weights with gradients
    with Checkpointer(tmp_path) as saved:
        saved.save(1, {"optimizer": fresh, "n": 1})
        fresh.step()
        saved.restore({"optimizer": fresh, "n": 0}, step=1, strict=False)
        assert sorted(fresh.state_dict()["state"]) == [0, 1]
        saved.restore({"optimizer": fresh, "n": 0}, step=1, where="n")
        assert sorted(fresh.state_dict()["state"]) == [0, 1]
        saved.restore({"optimizer": fresh, "n": 0}, step=1, where="optimizer.**")
        assert fresh.state_dict()["state"] == {}


def save_flattened(folder, use_orig_params):
    model = FullyShardedDataParallel(nn.Linear(4, 4), device_id=torch.device("cpu"), use_orig_params=use_orig_params)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found = []
    with Checkpointer(folder) as saved:
        run = {"model": model, "optimizer": optimizer}
        for save in (saved.save, lambda *given: saved.async_save(*given).result()):
            with pytest.raises(statetree.UnsupportedLeaf, match=r"at optimizer.*get_optimizer_state_dict") as error:
                save(1, run)
            found.append(str(error.value.path))
        found += saved.steps()
    return found


def resume_unsharded(folder, use_orig_params):
    torch.manual_seed(0)
    options = {"device_id": torch.device("cpu"), "sharding_strategy": ShardingStrategy.NO_SHARD}
    model = FullyShardedDataParallel(nn.Linear(4, 4), use_orig_params=use_orig_params, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with Checkpointer(folder) as saved:
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()
        saved.save(1, {"optimizer": optimizer})
        want = statetree.offload(optimizer.state_dict())
        optimizer.step()
        saved.restore({"optimizer": optimizer})
        return bool(statetree.similarity(optimizer.state_dict(), want))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("use_orig_params", [True, False])
def test_flattened_parameters_that_every_rank_has_whole_are_like_others(use_orig_params, world_size, tmp_path):
    assert run_ranks(world_size, resume_unsharded, tmp_path, use_orig_params) == [True] * world_size


@pytest.mark.parametrize("use_orig_params", [True, False])
def test_an_optimizer_of_flattened_parameters_is_refused(use_orig_params, tmp_path):
    assert run_ranks(2, save_flattened, tmp_path, use_orig_params) == [["optimizer", "optimizer"]] * 2
